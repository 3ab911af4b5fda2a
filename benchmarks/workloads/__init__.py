"""Workloads of the suite: one module each, with ``run(options, report)``."""
