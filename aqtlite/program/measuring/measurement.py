"""Measured times of the contractions of a plan, and the rules that follow from them."""

import dataclasses
import html
import json
import math
import re
from collections.abc import Callable, Collection
from typing import Any, Literal

from aqtlite import config, errors
from aqtlite.output import tables
from aqtlite.program.plan import Plan
from aqtlite.program.planned import PlannedContraction
from aqtlite.program.rules import patterns
from aqtlite.program.rules import rules as rules_lib
from aqtlite.program.rules.rules import Rule

Purpose = Literal["serving", "training"]

Verdict = Literal["pays", "even", "does not pay", "unresolved"]

_EVEN = 1.1
"""Gains up to this factor on either side of 1 change sides from run to run."""


@dataclasses.dataclass(frozen=True)
class MeasuredContraction:
    """Times of one contraction, and of all in a plan that are alike."""

    alike: tuple[PlannedContraction, ...]
    """Contractions of the plan with equal operations, shapes, dtypes and configs."""

    float_seconds: float
    """Time in float."""

    quantized_seconds: float
    """Time with both operands quantized in the call."""

    served_seconds: float | None = None
    """Time with a frozen weight; None in training, and without a weight."""

    resolution_seconds: float = 0.0
    """Least time that is told from none, and from another time."""

    @property
    def num_calls(self) -> int:
        """Number of such contractions in a call of the model, those of scans counted
        once for each step."""
        return sum(math.prod(one.site.lengths) for one in self.alike)

    @property
    def size(self) -> int:
        """Number of elements of the smaller operand, as in `Rule.min_size`."""
        return int(self.alike[0].size)

    @property
    def seconds(self) -> float:
        """Time as the model runs it: served if there is a frozen weight."""
        if self.served_seconds is None:
            return self.quantized_seconds
        return self.served_seconds

    @property
    def gain(self) -> float:
        """Time in float over `seconds`."""
        return self.float_seconds / self.seconds

    @property
    def is_injected(self) -> bool:
        """Whether its config was given where it is called, so that no rule applies."""
        return self.alike[0].is_injected

    @property
    def verdict(self) -> Verdict:
        """Whether quantizing it pays; "even" if the gain is within 1.1 of none.

        "unresolved" if the times differ by less than is told from none, and are too
        short for a gain of 1.1 to be seen.
        """
        times = self.float_seconds, self.seconds
        is_alike = max(times) - min(times) <= self.resolution_seconds
        if is_alike and self.resolution_seconds > (_EVEN - 1) * min(times):
            return "unresolved"
        if self.gain > _EVEN:
            return "pays"
        return "even" if self.gain >= 1 / _EVEN else "does not pay"


@dataclasses.dataclass(frozen=True, repr=False)
class Measurement:
    """Times of the quantized contractions of a plan; prints as a table."""

    purpose: Purpose
    """"serving", or "training": with gradients for both operands."""

    device: str
    """Kind of the device that ran them."""

    contractions: tuple[MeasuredContraction, ...]
    """Distinct contractions, in program order."""

    plan: Plan

    @property
    def float_seconds(self) -> float:
        """Sum over the contractions of a call of the model, all in float."""
        return sum(one.num_calls * one.float_seconds for one in self.contractions)

    @property
    def seconds(self) -> float:
        """Sum over the contractions of a call of the model, all as planned."""
        return sum(one.num_calls * one.seconds for one in self.contractions)

    @property
    def seconds_by_rules(self) -> float:
        """Sum over the contractions of a call of the model, as by `rules`."""
        return self._seconds_leaving(_can_be_left)

    @property
    def float_rules(self) -> tuple[Rule, ...]:
        """Rules that leave in float what does not pay, and match nothing else.

        Contractions with an injected config are not among them: no rule applies to
        those.
        """
        slower = {
            one.path
            for measured in self.contractions
            if _can_be_left(measured)
            for one in measured.alike
        }
        return _leaving_in_float(self.plan, slower)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """`float_rules`, then the rules of the plan, which may match nothing now."""
        chosen = self.float_rules
        if chosen == _ALL_FLOAT:
            return chosen
        kept = self.plan.rules
        if chosen:
            kept = tuple(dataclasses.replace(one, is_required=False) for one in kept)
        return (*chosen, *kept)

    @property
    def min_size(self) -> int | None:
        """The `Rule.min_size` by which the contractions take the least time.

        The size alone decides less well than the paths that `float_rules` name, and it
        holds for contractions that were not measured. 0 if quantizing all is fastest,
        None if quantizing none is. Injected configs and unresolved times do not count.
        """
        sizes = sorted({one.size for one in self.contractions if _decides_size(one)})
        return min((0, *sizes[1:], None), key=self.seconds_by_size)

    def seconds_by_size(self, min_size: int | None) -> float:
        """Sum over the contractions of a call of the model, as by a `Rule.min_size`.

        Args:
            min_size: contractions of smaller operands stay in float; None for all.
                Those whose times are unresolved count as planned.
        """
        return self._seconds_leaving(
            lambda one: _decides_size(one) and (min_size is None or one.size < min_size)
        )

    def _seconds_leaving(self, is_left: Callable[[MeasuredContraction], bool]) -> float:
        """Sum over the contractions of a call of the model, some left in float."""
        return sum(
            one.num_calls * (one.float_seconds if is_left(one) else one.seconds)
            for one in self.contractions
        )

    def to_json(self, *, indent: int | None = None) -> str:
        """Writes the measurement as JSON, with the paths of the contractions."""
        rows = []
        for one in self.contractions:
            first = one.alike[0]
            rows.append(
                {
                    "paths": [each.path for each in one.alike],
                    "op": first.op,
                    "lhs": dataclasses.asdict(first.lhs),
                    "rhs": dataclasses.asdict(first.rhs),
                    "cfg": json.loads(config.to_json(first.cfg)),
                    "num_calls": one.num_calls,
                    "size": one.size,
                    "float_seconds": one.float_seconds,
                    "quantized_seconds": one.quantized_seconds,
                    "served_seconds": one.served_seconds,
                    "resolution_seconds": one.resolution_seconds,
                    "gain": one.gain,
                    "verdict": one.verdict,
                }
            )
        fields: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("purpose", "device", "float_seconds", "seconds")
        }
        fields["seconds_by_rules"] = self.seconds_by_rules
        fields["min_size"] = self.min_size
        fields["contractions"] = rows
        fields["rules"] = json.loads(rules_lib.to_json(self.rules))
        return json.dumps(fields, indent=indent)

    def __repr__(self) -> str:
        return f"{self._title()}\n\n{self._table()}\n\n{self._advice()}"

    def _repr_html_(self) -> str:
        title, advice = html.escape(self._title()), html.escape(self._advice())
        return f"<p>{title}</p>{self._table()._repr_html_()}<pre>{advice}</pre>"

    def _title(self) -> str:
        return (
            f"{self.purpose} on {self.device}, microseconds; float "
            f"{_us(self.float_seconds)}, as planned {_us(self.seconds)}, by the rules "
            f"below {_us(self.seconds_by_rules)}"
        )

    def _advice(self) -> str:
        if all(one.verdict == "unresolved" for one in self.contractions):
            return "No contraction takes long enough for its gain to be measured."
        chosen = self.float_rules
        if chosen == _ALL_FLOAT:
            return "Quantizing pays nowhere."
        if not chosen:
            return "Nothing that rules decide about is slower than in float."
        lines = [f"  Rule(path={rule.path!r}, cfg=None)" for rule in chosen]
        lines.insert(0, "Rules that leave in float what does not pay:")
        return "\n".join([*lines, "", f"By size alone: {self._advice_on_size()}"])

    def _advice_on_size(self) -> str:
        size = self.min_size
        if size is None:
            return "all in float is fastest"
        microseconds = _us(self.seconds_by_size(size))
        if size == 0:
            return f"all as planned is fastest ({microseconds} microseconds)"
        return f"Rule(min_size={size:_}, cfg=...) ({microseconds} microseconds)"

    def _table(self) -> tables.Tables:
        times = ["float", "quantized"]
        if self.purpose == "serving":
            times.append("served")
        heads = ("path", "lhs", "rhs", "size", "calls", *times, "gain", "")
        return tables.Tables([[heads, *map(self._row, self.contractions)]])

    def _row(self, one: MeasuredContraction) -> tuple[str, ...]:
        first = one.alike[0]
        path = errors.label(first.path)
        if len(one.alike) > 1:
            path += f" and {len(one.alike) - 1} more"
        times = [one.float_seconds, one.quantized_seconds]
        cells = [_us_above(x, one.resolution_seconds) for x in times]
        if self.purpose == "serving":
            served = one.served_seconds
            cells.append(
                "-" if served is None else _us_above(served, one.resolution_seconds)
            )
        counts = f"{one.size:,}", str(one.num_calls)
        operands = str(first.lhs), str(first.rhs)
        gain = "-" if one.verdict == "unresolved" else f"{one.gain:.2f} x"
        return (path, *operands, *counts, *cells, gain, one.verdict)


_ALL_FLOAT = (Rule(cfg=None),)


def _leaving_in_float(plan: Plan, paths: Collection[str]) -> tuple[Rule, ...]:
    """Returns rules that leave contractions of a plan in float, and change no others.

    Paths that differ in numbers share a rule if it matches nothing else that the plan
    quantizes.

    Args:
        plan: the plan.
        paths: paths of contractions to leave in float. If nothing else is quantized,
            one rule leaves everything in float.
    """
    quantized = [one.path for one in plan.quantized()]
    if set(quantized) <= set(paths):
        return _ALL_FLOAT
    chosen: list[str] = []
    for path in quantized:
        if path not in paths or any(patterns.fullmatch(one, path) for one in chosen):
            continue
        exact = patterns.of_text(path)
        general = re.sub(r"\d+", r"\\d+", exact)
        alike = {one for one in quantized if patterns.fullmatch(general, one)}
        is_shared = len(alike) > 1 and alike <= set(paths)
        chosen.append(general if is_shared else exact)
    return tuple(Rule(path=path, cfg=None) for path in chosen)


def _can_be_left(one: MeasuredContraction) -> bool:
    return one.verdict == "does not pay" and not one.is_injected


def _decides_size(one: MeasuredContraction) -> bool:
    return one.verdict != "unresolved" and not one.is_injected


def _us_above(seconds: float, resolution: float) -> str:
    """Formats a time; one that is not told from none as less than the resolution."""
    return _us(seconds) if seconds > resolution else f"< {_us(resolution)}"


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f}"
