"""Timing, contestants, tables and JSON: what the workloads share."""
