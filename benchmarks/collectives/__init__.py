"""Collectives of a training step and of serving, by sharding strategy."""
