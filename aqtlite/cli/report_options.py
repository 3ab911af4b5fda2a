"""The arguments of ``aqtlite report``."""

import argparse

from aqtlite.cli import shared_options

DESCRIPTION = """\
Compile a model, and say what the compiled program does: each contraction with
the dtypes that it asks for and those that it runs in, its share of the work,
float copies of weights, exchanges between devices, memory. Nothing runs;
with --measure the model runs on ones, and each contraction has its time.

The factory is that of 'aqtlite plan'. With two factories, compare: what the
second changes, contraction by contraction. --config, --preset and --rules
quantize the last model: one factory twice compares a model with itself
quantized.
"""

EXAMPLES = """\
  aqtlite report model.py:factory
  aqtlite report model.py:factory --preset fully_quantized --backward
  aqtlite report model.py:factory --html report.html
  aqtlite report model.py:factory model.py:factory --preset w4a8
  aqtlite report model.py:factory --platform tpu --json
  aqtlite report model.py:factory --measure 20
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``aqtlite report``."""
    parser.add_argument(
        "models",
        metavar="FACTORY",
        nargs="+",
        type=shared_options.place,
        help="one or two functions that return (model, sample_args[, sample_kwargs]), "
        "as package.module:factory or path/to/file.py:factory",
    )
    shared_options.add_config(parser, "for the last factory")
    parser.add_argument(
        "--backward",
        action="store_true",
        help="report the gradient of the mean of all float results, too",
    )
    parser.add_argument(
        "--platform",
        choices=("cpu", "cuda", "rocm", "tpu"),
        help="read the program as it is lowered for a platform, on any host",
    )
    parser.add_argument(
        "--measure",
        metavar="RUNS",
        type=int,
        default=0,
        help="run each model so often under jax.profiler, for the time of contractions",
    )
    shared_options.add_path(
        parser, "--html", metavar="FILE", help="write a page with plots"
    )
    shared_options.add_overwrite(parser, "the page")
    shared_options.add_json(parser)
