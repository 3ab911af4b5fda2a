"""Options of the demo."""

import argparse
import dataclasses
import pathlib
from typing import Any

from aqtlite.errors import UserError

DESCRIPTION = """\
Train a small transformer twice, side by side: once in float32 and
once with every projection in int8, forward and backward (same initial
weights, same data, same order). Then convert each for serving, save it with
Orbax, load it in a fresh process, check there that what is served equals what
was trained bit for bit, and generate text from it. Ends with a table that
compares float32 with int8. An interrupted run goes on where it was, with the
same command.
"""

EXAMPLES = """\
  aqtlite demo                       on short stories
  aqtlite demo --text moby-dick.txt  on a text of yours
  aqtlite demo --smoke               a tiny run that shows every step, quickly
  aqtlite demo --fwd-bits 4          4-bit forward, 8-bit backward
"""

CACHES = ("float32", "int8", "int4", "int3")
"""Dtypes of a KV cache."""

PROMPT_FRACTION = 4
"""Inverse of the share of the context that the prompt takes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of one run.

    Raises:
        UserError: if a value is invalid, alone or combined with another.
    """

    steps: int = 360
    layers: int = 4
    width: int = 192
    heads: int = 4
    batch: int = 8
    length: int = 128
    lr: float = 3e-3
    seed: int = 0
    fwd_bits: int = 8
    bwd_bits: int = 8
    cache: str = "int8"
    """Dtype of the quantized model's KV cache, one of `CACHES`."""
    validation_batches: int = 32
    """Fixed batches on which both models' validation loss is measured."""
    new_tokens: int | None = None
    """Number of tokens to generate. None: as many as fit after the prompt."""
    text: pathlib.Path | None = None
    """File to train on. None: short stories."""
    out: pathlib.Path = pathlib.Path("aqtlite-demo")
    overwrite: bool = False
    """Start over even if an interrupted run could be resumed."""
    json: bool = False
    """Print the figures as JSON."""

    def __post_init__(self):
        for name in ("steps", "layers", "width", "heads", "batch"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"--{name} must be at least 1, got {getattr(self, name)}"
                )
        if self.length < 8:
            raise UserError(f"--length must be at least 8, got {self.length}")
        if self.width % self.heads:
            raise UserError(
                f"--width must be divisible by --heads, got {self.width} and "
                f"{self.heads}"
            )
        if not 0 < self.lr < float("inf"):
            raise UserError(f"--lr must be a positive number, got {self.lr}")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"--seed must be between 0 and 2**32 - 1, got {self.seed}")
        for name in ("fwd_bits", "bwd_bits"):
            if not 2 <= getattr(self, name) <= 8:
                raise UserError(
                    f"--{name.replace('_', '-')} must be between 2 and 8, got "
                    f"{getattr(self, name)}"
                )
        if self.cache not in CACHES:
            raise UserError(
                f"--cache must be one of {', '.join(CACHES)}, got {self.cache}"
            )
        room = self.length - self.prompt_length
        if self.new_tokens is not None and not 2 <= self.new_tokens <= room:
            raise UserError(
                f"--new-tokens must be between 2 and {room} (--length {self.length} "
                f"less a prompt of {self.prompt_length}), got {self.new_tokens}"
            )

    @property
    def prompt_length(self) -> int:
        """Length of the sample's prompt in tokens."""
        return self.length // PROMPT_FRACTION

    @property
    def generated_tokens(self) -> int:
        """Number of tokens to generate."""
        if self.new_tokens is None:
            return self.length - self.prompt_length
        return self.new_tokens

    @property
    def quantized_name(self) -> str:
        """Name of the quantized model in the report: ``int8``, ``int4-int8``."""
        if self.fwd_bits == self.bwd_bits:
            return f"int{self.fwd_bits}"
        return f"int{self.fwd_bits}-int{self.bwd_bits}"


SMOKE: dict[str, Any] = dict(
    steps=30, layers=2, width=64, batch=4, length=64, validation_batches=4
)
"""Values for ``--smoke``; explicit options take precedence."""


def from_arguments(args: argparse.Namespace) -> Options:
    """Options from a parsed command line.

    Args:
        args: result of a parser extended by `add_arguments`.

    Raises:
        UserError: as for `Options`.
    """
    names = {field.name for field in dataclasses.fields(Options)}
    given = {
        name: value
        for name, value in vars(args).items()
        if name in names and value is not None
    }
    return Options(**(SMOKE | given if args.smoke else given))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to a parser."""
    data = parser.add_argument_group("data and results")
    data.add_argument(
        "--text",
        type=pathlib.Path,
        metavar="FILE",
        help="text to train on, any encoding (default: short stories that a small "
        "grammar writes); the last tenth is held out",
    )
    data.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="DIR",
        help=f"where checkpoints, figures and plots go (default: {Options.out})",
    )
    data.add_argument(
        "--smoke",
        action="store_true",
        help="a tiny model and few steps: "
        + ", ".join(f"{name.replace('_', ' ')} {v}" for name, v in SMOKE.items())
        + "; options you set stay as you set them",
    )
    data.add_argument(
        "--overwrite",
        action="store_true",
        help="start anew; without it an interrupted run with these options goes on",
    )
    data.add_argument(
        "--json", action="store_true", help="print the figures as JSON, and no text"
    )

    training = parser.add_argument_group("training")
    _add(training, "steps", int, "optimizer steps of each model")
    _add(training, "batch", int, "sequences per step")
    _add(training, "length", int, "tokens per sequence, the model's context")
    _add(training, "lr", float, "peak learning rate of AdamW")
    _add(training, "seed", int, "of the initial weights, the data's order, the sample")

    model = parser.add_argument_group("model")
    _add(model, "layers", int, "transformer layers")
    _add(model, "width", int, "features, a multiple of --heads")
    _add(model, "heads", int, "attention heads")

    quantization = parser.add_argument_group("quantization")
    _add(quantization, "fwd_bits", int, "bits of both operands going forward, 2 to 8")
    _add(quantization, "bwd_bits", int, "bits of both operands going backward, 2 to 8")

    serving = parser.add_argument_group("serving")
    serving.add_argument(
        "--cache",
        choices=CACHES,
        help="dtype of the quantized model's KV cache (default: " + Options.cache + ")",
    )
    serving.add_argument(
        "--new-tokens",
        type=int,
        metavar="N",
        help="tokens to generate after the prompt (default: up to the context's end)",
    )


def _add(group: argparse._ArgumentGroup, name: str, kind: type, text: str) -> None:
    group.add_argument(
        f"--{name.replace('_', '-')}",
        type=kind,
        metavar="N" if kind is int else "X",
        help=f"{text} (default: {getattr(Options, name)})",
    )
