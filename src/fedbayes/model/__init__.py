"""A network and a likelihood as functions of flat vectors: calls, interception, estimators, curvature, predictions."""
