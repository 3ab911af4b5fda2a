"""Passes over graphs, from equations of JAX to operators that are rounded once."""
