"""The arguments of ``aqtlite convert`` and ``aqtlite show``.

Beside the package `aqtlite.checkpoint`, which takes a second to import.
"""

import argparse
import pathlib

CONVERT_DESCRIPTION = """\
Turn the checkpoint of a trained model into one for serving: int8 (or int4) weights
and their scales in place of the float weights that contractions use.

SOURCE is an Orbax checkpoint, a safetensors file or a folder of them, or a .msgpack
file of flax.serialization. TARGET is a file if it ends in .safetensors, else a folder,
for Orbax. Weights are converted one at a time: neither the float model nor the
converted one has to fit into memory. A conversion that was interrupted goes on where it
was when the same command is given again; TARGET appears only when it is whole.

Which parameters are weights, and how they are quantized, is found by tracing the model:

  # in serving.py:  def factory(): return MyModel(cfg), (jax.ShapeDtypeStruct(...),)
  aqtlite convert run/params run/serving --model serving:factory

The factory returns the model and a tuple of sample inputs (shapes will do), and maybe
a dictionary of keyword arguments. With --config or --preset it is called with that
config:

  aqtlite convert in out --model serving:factory --preset weight_only --fwd-bits 4

Without a model, rules name the parameters and the axes that contractions sum over:

  echo '[{"pattern": "*/kernel", "contracting": [0], "bits": 8}]' > rules.json
  aqtlite convert in out --rules rules.json

'aqtlite show TARGET' lists what came out; aqtlite.checkpoint.load_serving loads it.
"""

SHOW_DESCRIPTION = """\
List what a converted checkpoint holds: each frozen weight, what it was made of, its
grid, its number of scales, its size before and after, and the signal-to-noise ratio of
its quantization in dB (6 dB are one bit).
"""


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``aqtlite convert``."""
    parser.add_argument("source", metavar="SOURCE", type=pathlib.Path)
    parser.add_argument("target", metavar="TARGET", type=pathlib.Path)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help="a function that returns (model, sample_args)",
    )
    what.add_argument(
        "--rules",
        metavar="FILE",
        type=pathlib.Path,
        help="JSON: which parameters to freeze, in place of a model",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--config",
        metavar="FILE",
        type=pathlib.Path,
        help="a config as JSON (aqtlite.config.to_json), for the factory",
    )
    how.add_argument(
        "--preset",
        choices=("fully_quantized", "weight_only"),
        help="a preset of aqtlite.config, for the factory",
    )
    parser.add_argument(
        "--fwd-bits",
        metavar="N",
        type=int,
        help="bits of the preset's forward contraction (default 8)",
    )
    parser.add_argument(
        "--keep-float",
        metavar="PATTERN",
        action="append",
        default=[],
        help="leave weights in float whose path, or whose parameter's, matches "
        "(repeatable; * matches anything)",
    )
    parser.add_argument(
        "--allow-nonfinite",
        action="store_true",
        help="convert weights that hold NaN or infinities",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a TARGET that is there"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would be converted, with sizes, and write nothing",
    )


def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``aqtlite show``."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=pathlib.Path)
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
