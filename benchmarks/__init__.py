"""Measurements that users can run."""
