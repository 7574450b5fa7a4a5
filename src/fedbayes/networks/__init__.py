"""Networks of the papers, and estimators of expectations over an unmodified network's weights."""
