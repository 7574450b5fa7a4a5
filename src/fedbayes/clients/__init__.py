"""What a client does in a round, as a few pure functions written for one client."""
