"""What the server does with what clients send: rules, weightings, its own optimiser."""
