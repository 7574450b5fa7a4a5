"""Posteriors as immutable values over a flat weight vector, and where each named tensor lies in it."""
