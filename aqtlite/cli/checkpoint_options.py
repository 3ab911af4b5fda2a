"""The arguments of ``aqtlite convert`` and ``aqtlite show``.

Apart from the commands themselves, which take a second to import.
"""

import argparse
import pathlib

CONVERT_DESCRIPTION = """\
Turn the checkpoint of a trained model into one for serving: integer weights and their
scales in place of the float weights that contractions use.

SOURCE is an Orbax checkpoint, a safetensors file or a folder of them, or a .msgpack
file of flax.serialization. TARGET is a file if it ends in .safetensors, else a folder,
for Orbax. Weights are converted one at a time: neither the float model nor the
converted one has to fit into memory. TARGET appears only when it is whole. A conversion
that fails or is interrupted leaves its finished weights in .TARGET.converting: the same
command resumes there, and who gives up removes that folder.

Tracing the model finds the parameters that are weights, and how they are quantized:

  # in serving.py:  def factory(): return MyModel(cfg), (jax.ShapeDtypeStruct(...),)
  aqtlite convert run/params run/serving --model serving:factory

The factory returns the model and a tuple of sample inputs (shapes will do), and maybe
a dictionary of keyword arguments. The model is one of Linen or of NNX; make an NNX
model in nnx.eval_shape, which allocates nothing. With --config or --preset it is called
with that config:

  aqtlite convert in out --model serving:factory --preset weight_only --fwd-bits 4

SOURCE holds the model's variables, or "params" alone; of an NNX model its nnx.state or
pure dictionary. If it holds more, name the
subtree; several are collections:

  aqtlite convert run/3 out --model serving:factory --subtree state/params
  aqtlite convert in out --model serving:factory --subtree params --subtree batch_stats

'aqtlite show TARGET' lists what came out; aqtlite.checkpoint.load_serving loads it.
"""

SHOW_DESCRIPTION = """\
List the frozen weights of a converted checkpoint: the shape in which each is stored,
its grid, its number of scales, its megabytes in float and now, and the signal-to-noise
ratio of its quantization in dB (6 dB are one bit). --json adds the parameters of each.
"""


BITS_OF = {"fully_quantized": "fwd_bits", "weight_only": "bits", "qat": "bits"}
"""The presets of a number of bits, and their name for it."""

PRESETS = (
    "w4a8",
    "fp8",
    "mxfp8",
    "mxfp6",
    "mxfp4",
    "mxint8",
    "nvfp4",
    "block_fp8",
)
"""Other presets that need no statistics and no learned scales."""


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``aqtlite convert``."""
    parser.add_argument("source", metavar="SOURCE", type=pathlib.Path)
    parser.add_argument("target", metavar="TARGET", type=pathlib.Path)
    parser.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help="a function that returns (model, sample_args)",
    )
    # Conversion by rules without a model is no more; the command says so.
    parser.add_argument("--rules", help=argparse.SUPPRESS)
    parser.add_argument(
        "--subtree",
        metavar="PATH",
        action="append",
        default=[],
        help="the part of SOURCE to convert, such as params of a training state "
        "(repeatable)",
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
        choices=(*BITS_OF, *PRESETS),
        metavar="NAME",
        help="a preset of aqtlite.config, for the factory; others go by --config: "
        f"{', '.join((*BITS_OF, *PRESETS))}",
    )
    parser.add_argument(
        "--fwd-bits",
        metavar="N",
        type=int,
        help=f"bits of the forward contraction, of {', '.join(BITS_OF)} (default 8)",
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
    parser.add_argument(
        "--import",
        metavar="MODULE",
        dest="modules",
        action="append",
        default=[],
        help="a module that registers grids and calibrations of your own (repeatable)",
    )
