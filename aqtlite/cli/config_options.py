"""The arguments of ``aqtlite presets`` and ``aqtlite plan``."""

import argparse

from aqtlite.cli import shared_options
from aqtlite.cli.suggestions import one_of

PRESETS_DESCRIPTION = """\
List the presets of aqtlite.config: what each is, and what it needs. With a
name, explain one: for whom it is, its arguments, and what its config does
with each operand of each contraction.
"""

PRESETS_EXAMPLES = """\
  aqtlite presets
  aqtlite presets static_int8
  aqtlite presets nvfp4 --json    the config as JSON, for --config
"""

PLAN_DESCRIPTION = """\
List the contractions of a model, and how each would run, before anything
does: the operands with their shapes, and which of them are weights; the grids
of those that are quantized; and why the others stay in float.

The factory is that of 'aqtlite convert': it returns the model, of Linen or of
NNX, and a tuple of sample inputs, for which shapes will do. The model may be
a float one. With --config or --preset the factory is called with that config;
a float model of a factory without parameters has all of its contractions
quantized by it. With --rules, the float model is quantized by them.

With --measure, time each distinct contraction on this machine, in float and
quantized, say whether quantizing it pays, and print rules that leave in float
what is faster so. The times are kept in ~/.cache/aqtlite for the next call.
"""

PLAN_EXAMPLES = """\
  aqtlite plan --model model.py:factory
  aqtlite plan --model model.py:factory --preset fully_quantized
  aqtlite plan --model package.module:factory --config config.json --json
  aqtlite plan --model model.py:factory --preset w4a8 --measure serving
"""


def add_presets_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``aqtlite presets``."""
    names = ("unquantized", *shared_options.PRESETS)
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        type=one_of("preset", names),
        choices=names,
        help="the preset to explain (default: list all of them)",
    )
    shared_options.add_json(parser)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``aqtlite plan``."""
    shared_options.add_model(parser)
    shared_options.add_config(parser, "for the factory")
    parser.add_argument(
        "--platform",
        choices=("cpu", "cuda", "rocm", "tpu"),
        help="say in which dtypes each contraction is contracted there",
    )
    parser.add_argument(
        "--measure",
        choices=("serving", "training"),
        help="time the contractions: forward with frozen weights, or with gradients",
    )
    shared_options.add_json(parser)
