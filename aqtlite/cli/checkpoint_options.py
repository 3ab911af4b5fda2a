"""The arguments of ``aqtlite convert`` and ``aqtlite show``.

Separate from the commands themselves, which take seconds to import.
"""

import argparse

from aqtlite.cli import shared_options

CONVERT_DESCRIPTION = """\
Turn the checkpoint of a trained model into one for serving: integer weights
and their scales in place of the float weights that contractions use.

SOURCE is an Orbax checkpoint, a safetensors file or a folder of them, or a
.msgpack file of flax.serialization. It holds the model's variables, or
"params" alone; of an NNX model its nnx.state or pure dictionary. If it holds
more, name the subtree. TARGET is a file if it ends in .safetensors, else a
folder, for Orbax. With --map, SOURCE is a checkpoint of another library, in
float or quantized, as aqtlite.checkpoint.load_quantized reads them.

Tracing the model finds the parameters that are weights, and how they are
quantized. The factory returns the model and a tuple of sample inputs (shapes
will do), and maybe a dictionary of keyword arguments. The model is one of
Linen or of NNX; make an NNX model in nnx.eval_shape, which allocates nothing:

  # serving.py
  def factory(): return MyModel(cfg), (jax.ShapeDtypeStruct(...),)

With --config or --preset the factory is called with that config; a float
model of a factory without parameters has all of its contractions quantized by
it. With --rules, as 'aqtlite choose' writes them, the float model is
quantized by them. Configs with statistics of activations take them from
SOURCE, or gather them from examples: --calibrate names an .npz file with an
array for each positional argument, in the order of their names, whose first
axis counts examples. This needs the memory for the float model. All else
converts one weight at a time: neither the float model nor the converted one
has to fit into memory.

TARGET appears only when it is whole. A conversion that fails or is
interrupted leaves its finished weights in .TARGET.converting: the same
command resumes there, and who gives up removes that folder. 'aqtlite show
TARGET' lists what came out; aqtlite.checkpoint.load_serving loads it.
"""

CONVERT_EXAMPLES = """\
  aqtlite convert run/params run/serving --model serving:factory
  aqtlite convert in out --model serving.py:factory --preset weight_only \\
    --fwd-bits 4
  aqtlite convert in out --model serving.py:factory --preset static_int8 \\
    --calibrate data.npz
  aqtlite convert run/3 out --model serving:factory --subtree state/params
  aqtlite convert in out --model serving:factory --subtree params \\
    --subtree batch_stats
"""

SHOW_DESCRIPTION = """\
List what a checkpoint holds.

A converted checkpoint: every frozen weight with its stored shape, grid,
number of scales, size before and after conversion, and signal-to-noise ratio
of quantization in dB (6 dB are one bit).

A float checkpoint, in any format that 'aqtlite convert' reads: the tree of
arrays with shapes, dtypes and sizes; --subtree of other commands takes a
path in this tree. The folder of an Orbax CheckpointManager: the steps, and
the tree of the latest step.

A quantized checkpoint of another library, such as GGUF, GPTQ or
compressed-tensors: the tree of weights, with the bits and blocks of each, as
aqtlite.checkpoint.load_quantized reads them.
"""

SHOW_EXAMPLES = """\
  aqtlite show run/serving            a converted checkpoint
  aqtlite show run                    the steps of a checkpoint manager
  aqtlite show run/3 --depth 2        the sizes of the subtrees of a step
  aqtlite show model.safetensors --json
  aqtlite show model-Q4_K_M.gguf      a quantized model of llama.cpp
"""


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``aqtlite convert``."""
    shared_options.add_path(parser, "source", metavar="SOURCE")
    shared_options.add_path(parser, "target", metavar="TARGET")
    shared_options.add_model(parser)
    shared_options.add_subtree(parser)
    shared_options.add_path(
        parser,
        "--map",
        metavar="FILE",
        help="JSON with the map from the names of another library's SOURCE to the "
        "model's (checkpoint.Move)",
    )
    shared_options.add_config(parser, "for the factory")
    shared_options.add_examples(
        parser, "which statistics of activations are gathered with"
    )
    shared_options.add_batch_size(parser)
    parser.add_argument(
        "--keep-float",
        metavar="PATTERN",
        action="append",
        default=[],
        help="leave weights in float whose path, or whose parameter's, matches "
        "(repeatable; * matches anything)",
    )
    parser.add_argument(
        "--packed",
        metavar="PLATFORM",
        help="store integers as the kernel of a platform reads them: cpu",
    )
    parser.add_argument(
        "--allow-nonfinite",
        action="store_true",
        help="convert weights that hold NaN or infinities",
    )
    shared_options.add_overwrite(parser, "a TARGET that is there")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would be converted, with sizes, and write nothing",
    )
    shared_options.add_json(parser)


def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``aqtlite show``."""
    shared_options.add_path(parser, "checkpoint", metavar="CHECKPOINT")
    parser.add_argument(
        "--depth",
        metavar="N",
        type=int,
        help="levels of the tree of a float checkpoint (default: all)",
    )
    shared_options.add_json(parser)
    parser.add_argument(
        "--import",
        metavar="MODULE",
        dest="modules",
        action="append",
        default=[],
        help="a module that registers grids and calibrations of your own (repeatable)",
    )
