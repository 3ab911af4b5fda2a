"""The arguments of ``aqtlite edge``.

Apart from the command itself, which takes seconds to import.
"""

import argparse
import pathlib

DESCRIPTION = """\
Write a trained model into a file of integers, int8 from input to output: for LiteRT, or
for onnxruntime.

SOURCE is a checkpoint of float variables: of Orbax, a safetensors file or a folder of
them, or a .msgpack file of flax.serialization. TARGET ends in .tflite or in .onnx. It
is read back and compared, integer for integer, before it appears.

  # in deploy.py:  def factory(): return MyModel(), (jax.ShapeDtypeStruct(...),)
  aqtlite edge run/3 model.tflite --model deploy:factory --calibrate data.npz

The factory returns the model, of Linen or of NNX, a tuple of sample inputs (shapes will
do), and maybe a dictionary of keyword arguments, such as {"train": False}. The file is
for these shapes. The model is as it serves: of NNX, after model.eval(). Made in
nnx.eval_shape it allocates nothing.

The ranges of all values come from examples. data.npz holds an array for each positional
argument; its first axis counts examples, and the others are those of the argument. The
arrays are taken in the order of their names, in which numbers count as such: arr_0,
arr_1, ..., arr_10, as numpy.savez(file, x, y, ...) names them, or a, b, c. The table
that comes of it can be kept, read, edited and used again:

  aqtlite edge run/3 a.tflite --model deploy:factory --calibrate data.npz \\
    --save-ranges ranges.json
  aqtlite edge run/3 b.tflite --model deploy:factory --ranges ranges.json

--rules names a file of aqtlite.edge.rules.to_json, which says what has other integers
than int8, or stays in float:

  {"version": 1, "rules": [{"path": ".*/head", "is_float": true}, {"weights": "int4"}]}

If SOURCE holds more than the variables, name the subtree; several are collections:

  aqtlite edge run/3 out.tflite ... --subtree state/params --subtree state/batch_stats
"""

CALIBRATIONS = "max, mean, average[=DECAY], percentile=PERCENTAGE or mse"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``aqtlite edge``."""
    parser.add_argument("source", metavar="SOURCE", type=pathlib.Path)
    parser.add_argument("target", metavar="TARGET", type=pathlib.Path)
    parser.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        required=True,
        help="a function that returns (model, sample_args[, sample_kwargs])",
    )
    ranges = parser.add_mutually_exclusive_group(required=True)
    ranges.add_argument(
        "--calibrate",
        metavar="FILE.npz",
        type=pathlib.Path,
        help="examples that the ranges are found with",
    )
    ranges.add_argument(
        "--ranges",
        metavar="FILE.json",
        type=pathlib.Path,
        help="ranges that were found before (--save-ranges, or edge.Ranges.save)",
    )
    parser.add_argument(
        "--save-ranges",
        metavar="FILE.json",
        type=pathlib.Path,
        help="write the ranges that --calibrate finds",
    )
    parser.add_argument(
        "--batch-size",
        metavar="N",
        type=int,
        default=32,
        help="examples that the model is given at once, in calibration (default "
        "%(default)s)",
    )
    parser.add_argument(
        "--calibration",
        metavar="HOW",
        default="max",
        help=f"what is kept of the batches: {CALIBRATIONS}. The largest value, the "
        "default, clips nothing that was seen; mean is that of the largest of each "
        "batch, and average a moving one; mse clips where the squared error is least",
    )
    parser.add_argument(
        "--rules",
        metavar="FILE.json",
        type=pathlib.Path,
        help="which integers (aqtlite.edge.rules.to_json); int8 without it",
    )
    parser.add_argument(
        "--interface",
        choices=("integer", "float"),
        default="integer",
        help="whether inputs and outputs of the file are integers (the default) or "
        "float32",
    )
    parser.add_argument(
        "--subtree",
        metavar="PATH",
        action="append",
        default=[],
        help="the part of SOURCE that holds the variables, such as params of a "
        "training state (repeatable)",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace files that are there"
    )
