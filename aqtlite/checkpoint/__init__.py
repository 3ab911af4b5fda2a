"""Checkpoints on disk: conversion of float ones, loading of converted ones."""

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
