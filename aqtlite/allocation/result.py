"""The configs of all weights under a budget, and what was measured."""

import dataclasses
import json
import os
from typing import Any, Literal

import rich.console
import rich.text
from rich import filesize

from aqtlite import errors
from aqtlite.output import plots, rich_tables
from aqtlite.program.rules import rules as rules_lib
from aqtlite.program.rules.rules import Rule

Unit = Literal["bytes", "seconds"]
"""What a budget is of."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The choice for one weight."""

    paths: tuple[str, ...]
    """Paths of the contractions that read it."""

    candidate: str
    """Name of the candidate, or "float"."""

    nbytes: int
    """Bytes of the weight, as a checkpoint keeps it."""

    float_bytes: int
    """Bytes of its parameters."""

    cost: float
    """Change of the loss with this weight alone quantized; without a loss, power of the
    error of the output by that of the output."""

    seconds: float | None = None
    """Time of its contractions; None without a budget of seconds."""

    float_seconds: float | None = None
    """Time of its contractions in float; None without a budget of seconds."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A measured choice for all weights."""

    name: str
    """Name of the candidate that all weights have, "float", or "chosen"."""

    nbytes: int
    """Bytes of all variables, as a checkpoint keeps them."""

    seconds: float | None
    """Sum of the times of all contractions that read a weight; None without a budget of
    seconds."""

    loss: float | None
    """Loss; None without a function for it."""

    snr: float
    """Signal-to-noise ratio of the output in dB."""

    rules: tuple[Rule, ...] = dataclasses.field(repr=False)
    """A rule for each contraction of a weight, for `aqtlite.flax.quantize_model`,
    `aqtlite.quantize_function` and the like."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields, without the rules, as plain data."""
        fields = dataclasses.fields(self)
        return {f.name: getattr(self, f.name) for f in fields if f.name != "rules"}


@dataclasses.dataclass(frozen=True, repr=False)
class Allocation:
    """The configs of all weights under a budget; prints as tables."""

    budget: int | float
    """The budget, in `unit`."""

    chosen: Point
    """The choice under the budget."""

    choices: tuple[Choice, ...]
    """The choice for each weight, in program order."""

    uniform: tuple[Point, ...]
    """All weights in float, and with each of the candidates."""

    curve: tuple[Point, ...]
    """The choices under other budgets, by increasing bytes, with rules of their own."""

    batches: int
    """Number of batches."""

    unit: Unit = "bytes"
    """What the budget is of: bytes of all variables, or seconds of a call."""

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules of the choice under the budget; see `Point.rules`."""
        return self.chosen.rules

    def to_json(self, *, indent: int | None = None) -> str:
        """Writes all of it as JSON: the rules as `aqtlite.rules.to_json` does."""
        figures = {
            "budget": self.budget,
            "unit": self.unit,
            "batches": self.batches,
            "chosen": self.chosen.to_dict(),
            "choices": [dataclasses.asdict(one) for one in self.choices],
            "uniform": [one.to_dict() for one in self.uniform],
            "curve": [one.to_dict() for one in self.curve],
        }
        rules = json.loads(rules_lib.to_json(self.rules))
        return json.dumps(
            {**rich_tables.finite(figures), "rules": rules}, indent=indent
        )

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the loss by bytes, of choices and of uniform candidates, into a file.

        By microseconds, if the budget is of seconds.

        Without a loss, the signal-to-noise ratio of the output.

        Args:
            path: name of the file, which ends in ".png", ".svg" or ".pdf".

        Raises:
            ModuleNotFoundError: if Matplotlib is not installed.
        """
        label = "loss"
        if self.chosen.loss is None:
            label = "signal-to-noise ratio of the output, dB"
        in_float, *others = self.uniform
        spent = "bytes" if self.unit == "bytes" else "microseconds"
        plots.curve(
            [(_spent(one), _value(one)) for one in self.curve],
            {one.name: (_spent(one), _value(one)) for one in others},
            (_spent(self.chosen), _value(self.chosen)),
            _value(in_float),
            (spent, label),
            path,
        )

    def summary(self) -> str:
        """Returns the budget and the number of weights with each candidate as text."""
        names = [one.candidate for one in self.choices]
        counts = ", ".join(f"{names.count(n)} {n}" for n in dict.fromkeys(names))
        size = filesize.decimal(self.chosen.nbytes)
        if self.chosen.seconds is None:
            within = f"{size} of at most {filesize.decimal(int(self.budget))}"
        else:
            within = (
                f"{_microseconds(self.chosen.seconds)} of at most "
                f"{_microseconds(self.budget)} microseconds, {size}"
            )
        return f"{within}; {len(names)} weights: {counts}"

    def _tables(self) -> list[rich_tables.Rows]:
        rows = [self.chosen, *sorted(self.uniform, key=lambda one: one.nbytes)]
        times = ["us"] * (self.unit == "seconds")
        heads = ["all weights", "bytes", *times, "output dB"]
        points = [heads + ["loss"] * (self.chosen.loss is not None)]
        for point in rows:
            cells = [point.name, f"{point.nbytes:,}", *_times(point.seconds)]
            losses = [f"{x:.6g}" for x in (point.loss,) if x is not None]
            points.append([*cells, f"{point.snr:.1f}", *losses])
        in_float = ["in float"] * len(times)
        heads = ["weight of", "choice", "bytes", "in float", *times, *in_float]
        weights = [[*heads, "cost alone"]]
        for one in self.choices:
            paths = ", ".join(errors.label(path) for path in one.paths)
            cells = [paths, one.candidate, f"{one.nbytes:,}", f"{one.float_bytes:,}"]
            cells += [*_times(one.seconds), *_times(one.float_seconds)]
            weights.append([*cells, f"{one.cost:+.3g}"])
        return [weights, points]

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> rich.console.RenderResult:
        weights, points = self._tables()
        yield rich.text.Text(self.summary())
        yield rich_tables.layout(weights, num_texts=2)
        yield rich_tables.layout(points, num_texts=1)

    def _repr_html_(self) -> str:
        weights, points = self._tables()
        return rich_tables.as_html(self.summary(), weights, points)

    def __repr__(self) -> str:
        return rich_tables.as_text(self)


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f}"


def _times(seconds: float | None) -> list[str]:
    return [] if seconds is None else [_microseconds(seconds)]


def _spent(point: Point) -> float:
    return point.nbytes if point.seconds is None else 1e6 * point.seconds


def _value(point: Point) -> float:
    return point.snr if point.loss is None else point.loss
