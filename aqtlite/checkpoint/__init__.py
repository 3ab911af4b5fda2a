"""Checkpoints on disk: conversion of float ones, loading of converted ones.

A conversion reads, freezes and writes one weight at a time, and publishes the result
whole or not at all; `formats` has a file for each format. A manifest beside the arrays
says how each weight was made. Read `convert` first.
"""

from aqtlite.checkpoint.convert import convert_checkpoint
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.load import load_serving, summarize
from aqtlite.checkpoint.report import Report

__all__ = [
    "CheckpointError",
    "Report",
    "convert_checkpoint",
    "load_serving",
    "summarize",
]
