"""What happens to uploads: rules, weightings, and a round as pure functions."""
