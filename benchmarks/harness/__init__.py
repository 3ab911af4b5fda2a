"""Shared parts of the workloads: timing, contestants, tables and JSON."""
