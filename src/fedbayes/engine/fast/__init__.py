"""Gradients written by hand for forms of steps that are worth it."""
