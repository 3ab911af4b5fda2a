"""The arguments of ``aqtlite choose``."""

import argparse
import re
from typing import Literal, NamedTuple

from aqtlite.cli import shared_options
from aqtlite.cli.shared_options import BITS_OF, LEARNED, PRESETS
from aqtlite.cli.suggestions import one_of

DESCRIPTION = """\
Choose a config for each weight of a trained model, under a budget of bytes or
of time.

SOURCE is a checkpoint of float variables, as for 'aqtlite convert'. Each
weight is quantized alone, with each of the candidates, to measure what that
does to the loss; the choice with the least sum of costs is found, measured,
and compared with one candidate for all weights. 'aqtlite plan' and 'aqtlite
convert' take the rules that come out as --rules, and Python reads them by
aqtlite.rules.from_json.

The factory is that of 'aqtlite convert', and its model a float one. data.npz
holds an array for each positional argument; its first axis counts examples.
Arrays behind these, by their names, such as labels, are for the loss: with
--loss, loss(outputs, *arrays) of all arrays of a batch returns a scalar.
Without it, the error of the output counts.

  # model.py
  def factory(): return MyModel(), (jax.ShapeDtypeStruct(...),)
  def loss(logits, x, labels): ...
"""

EXAMPLES = """\
  aqtlite choose run/params --model model.py:factory --calibrate data.npz \\
    --candidates weight_only=4 weight_only=8 --budget 1.5MB --out rules.json
  aqtlite choose run/params --model model.py:factory --calibrate data.npz \\
    --candidates weight_only=4 fully_quantized --budget 0.2 \\
    --loss model.py:loss --plot bits.png
  aqtlite convert run/params run/serving --model model.py:factory \\
    --rules rules.json
  aqtlite choose run/params --model model.py:factory --calibrate data.npz \\
    --candidates gptq=3 gptq=4 gptq=8 --budget 0.15 --out rules.json
  aqtlite convert run/params run/serving --model model.py:factory \\
    --rules rules.json --calibrate data.npz
"""

_UNITS = {
    "B": 1,
    **{f"{letter}B": 1000**i for i, letter in enumerate(("k", "M", "G"), 1)},
    **{f"{letter}iB": 1024**i for i, letter in enumerate(("K", "M", "G"), 1)},
}

_TIMES = {"s": 1, "ms": 1e3, "us": 1e6}
"""Units of time in a second."""

_BITS = range(2, 9)


def _names() -> tuple[str, ...]:
    """Returns presets without learned scales, also with a number of bits."""
    usable = [name for name in PRESETS if name not in LEARNED]
    with_bits = [f"{name}={n}" for name in usable if name in BITS_OF for n in _BITS]
    return (*usable, *with_bits)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``aqtlite choose``."""
    shared_options.add_path(parser, "source", metavar="SOURCE")
    required = shared_options.add_model(parser)
    shared_options.add_examples(
        required, "which the choice is measured with", required=True
    )
    required.add_argument(
        "--budget",
        metavar="SIZE",
        required=True,
        type=budget_of,
        help="bound of the bytes of all variables, such as 1.5MB or 700KiB; a part of "
        "the bytes in float, such as 0.25; or bound of the time of the contractions of "
        "weights in a call with a batch, as measured on this machine, such as 2ms",
    )
    names = _names()
    parser.add_argument(
        "--candidates",
        metavar="NAME",
        nargs="+",
        type=one_of("candidate", names),
        choices=names,
        default=[],
        help="presets of aqtlite.config to choose from, with NAME=BITS for those with "
        "a bit width",
    )
    shared_options.add_path(
        parser,
        "--config",
        metavar="FILE.json",
        dest="configs",
        action="append",
        default=[],
        help="a config to choose from (aqtlite.config.to_json; repeatable)",
    )
    parser.add_argument(
        "--loss",
        metavar="MODULE:FUNCTION",
        type=shared_options.place,
        help="the function of the loss, as package.module:function or "
        "path/to/file.py:function",
    )
    shared_options.add_path(
        parser, "--out", metavar="RULES.json", help="write the rules into a file"
    )
    shared_options.add_path(
        parser, "--plot", metavar="FILE.png", help="draw the loss by bytes"
    )
    shared_options.add_batch_size(parser)
    shared_options.add_subtree(parser)
    shared_options.add_overwrite(parser, "files that are there")
    shared_options.add_json(parser)


class Budget(NamedTuple):
    """A budget, as `aqtlite.choose_bits` takes it."""

    amount: int | float
    unit: Literal["bytes", "seconds"] = "bytes"


def budget_of(text: str) -> Budget:
    """Reads a number of bytes, a part of them as a float, or a time.

    >>> budget_of("1.5MB").amount, budget_of("2KiB").amount, budget_of("0.25").amount
    (1500000, 2048, 0.25)
    >>> budget_of("1.5ms")
    Budget(amount=0.0015, unit='seconds')

    Raises:
        argparse.ArgumentTypeError: if it is none of these.
    """
    found = re.fullmatch(r"(\d+|\d*\.\d+)\s*([A-Za-z]*)", text.strip())
    if found is None or (found[2] and found[2] not in {**_UNITS, **_TIMES}):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size: write bytes such as 1500000, 1.5MB or 700KiB, a "
            "part of the float size such as 0.25, or a time such as 1.5ms"
        )
    number, unit = found.groups()
    if unit in _TIMES:
        return Budget(float(number) / _TIMES[unit], "seconds")
    if unit:
        return Budget(round(float(number) * _UNITS[unit]))
    return Budget(float(number) if "." in number else int(number))
