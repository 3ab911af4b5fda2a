"""The arguments of ``aqtlite edge``.

Separate from the command itself, which takes seconds to import.
"""

import argparse

from aqtlite.cli import shared_options
from aqtlite.cli.suggestions import one_of

DESCRIPTION = """\
Write a trained model into a file of integers, int8 from input to output: for
LiteRT, or for onnxruntime.

SOURCE is a checkpoint of float variables: of Orbax, a safetensors file or a
folder of them, or a .msgpack file of flax.serialization. If it holds more
than the variables, name the subtree; several are collections. TARGET ends in
.tflite or in .onnx. It is read back and compared, integer for integer, before
it appears.

The factory returns the model, of Linen or of NNX, a tuple of sample inputs
(shapes will do), and maybe a dictionary of keyword arguments, such as
{"train": False}. The file is for these shapes. The model is as it serves: of
NNX, after model.eval(). Made in nnx.eval_shape it allocates nothing.

  # deploy.py
  def factory(): return MyModel(), (jax.ShapeDtypeStruct(...),)

The ranges of all values come from examples. data.npz holds an array for each
positional argument; its first axis counts examples, and the others are those
of the argument. The arrays are taken in the order of their names, in which
numbers count as such: arr_0, arr_1, ..., arr_10, as numpy.savez(file, x, y,
...) names them, or a, b, c. --save-ranges writes the table of ranges, which
can be read and edited; --ranges uses it again.

In place of ranges, --preset or --config give a file with float activations:
weight_only has integer weights alone, and qat and w4a8 also activations that
the runtime quantizes by their own range at each call. These need no examples.

--rules names a file written by aqtlite.edge.rules.to_json, with the values
that stay in float or have integers other than int8:

  {"version": 1, "rules": [{"path": ".*/head", "is_float": true},
                           {"weights": "int4"}]}
"""

EXAMPLES = """\
  aqtlite edge run/3 a.tflite --model deploy:factory --calibrate data.npz
  aqtlite edge run/3 a.tflite --model deploy.py:factory --calibrate data.npz \\
    --save-ranges ranges.json
  aqtlite edge run/3 b.onnx --model deploy.py:factory --ranges ranges.json
  aqtlite edge run/3 c.tflite --model deploy:factory --ranges ranges.json \\
    --subtree state/params --subtree state/batch_stats
  aqtlite edge run/3 d.onnx --model deploy:factory --preset weight_only \\
    --fwd-bits 4
  aqtlite edge run/3 e.tflite --model deploy:factory --ranges ranges.json \\
    --interface uint8
"""

# Before Python 3.13, argparse writes alternatives in one line, however long.
_USAGE = """\
%(prog)s [options] --model MODULE:FACTORY
                    (--calibrate FILE.npz | --ranges FILE.json |
                     --preset NAME | --config FILE.json) SOURCE TARGET"""

PRESETS = ("weight_only", "qat", "w4a8")
"""Presets of files without ranges."""

CALIBRATIONS = "max, mean, average[=DECAY], percentile=PERCENTAGE or mse"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``aqtlite edge``."""
    parser.usage = _USAGE
    shared_options.add_path(parser, "source", metavar="SOURCE")
    shared_options.add_path(parser, "target", metavar="TARGET")
    required = shared_options.add_model(parser)
    ranges = required.add_mutually_exclusive_group(required=True)
    shared_options.add_examples(ranges, "which the ranges are found with")
    shared_options.add_path(
        ranges,
        "--ranges",
        metavar="FILE.json",
        help="or ranges that were found before (--save-ranges, edge.Ranges.save)",
    )
    ranges.add_argument(
        "--preset",
        type=one_of("preset of a file without ranges", PRESETS),
        choices=PRESETS,
        metavar="NAME",
        help="or no ranges, and float activations: integer weights alone "
        "(weight_only), or with activations by dynamic ranges (qat, w4a8)",
    )
    shared_options.add_path(
        ranges,
        "--config",
        metavar="FILE.json",
        help="or no ranges, and another config of the contractions "
        "(aqtlite.config.to_json)",
    )
    parser.add_argument(
        "--fwd-bits",
        metavar="N",
        type=int,
        help="bits of the weights, with --preset weight_only (default 8); activations "
        "are quantized to 8 bits, and --preset w4a8 has weights of 4 bits beside them",
    )
    shared_options.add_path(
        parser,
        "--save-ranges",
        metavar="FILE.json",
        help="write the ranges that --calibrate finds",
    )
    shared_options.add_batch_size(parser)
    parser.add_argument(
        "--calibration",
        metavar="HOW",
        default="max",
        help=f"what is kept of the batches: {CALIBRATIONS}. The largest value, the "
        "default, clips nothing that was seen; mean is that of the largest of each "
        "batch, and average a moving one; mse clips where the squared error is least",
    )
    shared_options.add_path(
        parser,
        "--rules",
        metavar="FILE.json",
        help="which integers (aqtlite.edge.rules.to_json); int8 without it",
    )
    parser.add_argument(
        "--interface",
        choices=("integer", "uint8", "float"),
        help="whether inputs and outputs of the file are integers (the default with "
        "ranges), uint8 in place of int8, as pixels are, or float32 (always without "
        "ranges)",
    )
    parser.add_argument(
        "--processors",
        choices=("any", "vnni"),
        default="any",
        help="where the results of an .onnx file have to be right: on all (the "
        "default), or only on those with VNNI, where it is faster",
    )
    shared_options.add_subtree(parser)
    shared_options.add_overwrite(parser, "files that are there")
    shared_options.add_json(parser)
