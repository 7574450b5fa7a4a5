"""Engines carry a round to its clients and bring the sum back; on the same seed they agree."""
