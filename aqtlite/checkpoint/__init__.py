"""Conversion of float checkpoints for serving, and loading of converted checkpoints.

A conversion reads, freezes and writes one weight at a time, and publishes the result
atomically; `formats` has a file for each format. A manifest beside the arrays records
how each weight was quantized. Read `convert` first.
"""

from aqtlite.checkpoint.convert import convert_checkpoint
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.filling import fill
from aqtlite.checkpoint.load import load_serving, summarize
from aqtlite.checkpoint.move import Move, moves_from_json, moves_to_json
from aqtlite.checkpoint.name_map import MovedWeights, move_weights
from aqtlite.checkpoint.peft import load_peft, peft_config, save_peft
from aqtlite.checkpoint.read_quantized import QuantizedCheckpoint, load_quantized
from aqtlite.checkpoint.report import Report
from aqtlite.checkpoint.weight_config import config_of
from aqtlite.checkpoint.write_quantized import save_quantized

__all__ = [
    "CheckpointError",
    "Move",
    "MovedWeights",
    "QuantizedCheckpoint",
    "Report",
    "config_of",
    "convert_checkpoint",
    "fill",
    "load_peft",
    "load_quantized",
    "load_serving",
    "move_weights",
    "moves_from_json",
    "moves_to_json",
    "peft_config",
    "save_peft",
    "save_quantized",
    "summarize",
]
