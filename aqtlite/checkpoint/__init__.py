"""Checkpoints on disk: float ones in, ones for serving out."""

from aqtlite.checkpoint.convert import convert_by_rules, convert_checkpoint
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.from_rules import Rule, rules_from_json
from aqtlite.checkpoint.load import load_serving, summarize
from aqtlite.checkpoint.report import Report

__all__ = [
    "CheckpointError",
    "Report",
    "Rule",
    "convert_by_rules",
    "convert_checkpoint",
    "load_serving",
    "rules_from_json",
    "summarize",
]
