"""Two reports side by side: `Report.compare`."""

import collections
import dataclasses
import html
import json
from collections.abc import Iterable
from typing import Any

import rich.box
import rich.console
import rich.table
import rich.text
from rich import filesize

from aqtlite import errors
from aqtlite.output import rich_tables, tables
from aqtlite.reporting.contraction import ReportedContraction
from aqtlite.reporting.memory import Memory

Key = tuple[str, str, int]


@dataclasses.dataclass(frozen=True)
class Change:
    """A contraction in two programs."""

    path: str
    role: str
    before: ReportedContraction | None
    """The one of the first program; None if only the second has it."""

    after: ReportedContraction | None

    @property
    def is_changed(self) -> bool:
        """Whether it runs in other dtypes, or other numbers of products."""
        return _ran(self.before) != _ran(self.after)


def _ran(one: ReportedContraction | None) -> tuple[str, int] | None:
    return None if one is None else (one.runs_in, one.compiled_macs)


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """What two programs do, contraction by contraction; prints as a table."""

    names: tuple[str, str]
    changes: tuple[Change, ...]
    """All contractions of both: those of equal path and role are one, in their order.
    """

    memory: tuple[Memory | None, Memory | None]
    saved_bytes: tuple[int, int]
    shares: tuple[dict[str, float], dict[str, float]]

    def changed(self) -> tuple[Change, ...]:
        """Returns the contractions that run otherwise, or in one program only."""
        return tuple(one for one in self.changes if one.is_changed)

    def to_json(self, *, indent: int | None = None) -> str:
        """Writes the comparison as JSON: an object with its fields."""
        return json.dumps(dataclasses.asdict(self), indent=indent)

    def summary(self) -> list[str]:
        """Returns lines about both programs as a whole."""
        lines = [f"{len(self.changed())} of {len(self.changes)} contractions differ"]
        for name, shares, memory, saved in zip(
            self.names, self.shares, self.memory, self.saved_bytes, strict=True
        ):
            parts = ", ".join(f"{part:.1%} in {x}" for x, part in shares.items())
            line = f"{name}: {parts or 'no contraction'}"
            if memory is not None:
                line += f"; memory {filesize.decimal(memory.peak)}"
            if saved:
                line += f", saved for the backward pass {filesize.decimal(saved)}"
            lines.append(line)
        return lines

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                "*" if one.is_changed else "",
                errors.label(one.path),
                one.role,
                *map(_text, (one.before, one.after)),
            )
            for one in self.changes
        ]

    def _heads(self) -> tuple[str, ...]:
        return ("", "path", "role", *self.names)

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> rich.console.RenderResult:
        table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
        for name in self._heads():
            table.add_column(name, overflow="fold")
        for row in self._rows():
            table.add_row(*map(rich.text.Text, row))
        yield table
        yield rich.text.Text("\n".join(self.summary()))

    def _repr_html_(self) -> str:
        below = "".join(f"<p>{html.escape(line)}</p>" for line in self.summary())
        return tables.as_html([self._heads(), *self._rows()]) + below

    def __repr__(self) -> str:
        return rich_tables.as_text(self)


def _text(one: ReportedContraction | None) -> str:
    if one is None:
        return "-"
    frozen = ", frozen" if one.is_frozen else ""
    times = one.compiled_macs / one.macs if one.macs else 0
    more = f", {times:.3g} times the products" if times > 1.01 else ""
    return f"{one.runs_in}{frozen}{more}"


def compare(first: Any, second: Any) -> Comparison:
    """Compares two reports.

    Args:
        first: a `Report`.
        second: another one.
    """
    before, after = _by_key(first.contractions), _by_key(second.contractions)
    keys = dict.fromkeys([*before, *after])
    if not before.keys() & after.keys() and len(before) == len(after):
        # Programs that name nothing alike: by their order.
        pairs = list(zip(before, before.values(), after.values(), strict=True))
    else:
        pairs = [(key, before.get(key), after.get(key)) for key in keys]  # type: ignore[misc]
    names = first.name, second.name
    if names[0] == names[1]:
        names = f"{names[0]} (first)", f"{names[1]} (second)"
    return Comparison(
        names,
        tuple(Change(path, role, one, other) for (path, role, _), one, other in pairs),
        (first.memory, second.memory),
        (first.saved_bytes, second.saved_bytes),
        (first.shares, second.shares),
    )


def _by_key(
    contractions: Iterable[ReportedContraction],
) -> dict[Key, ReportedContraction]:
    """Returns contractions by path, role, and number among those of equal ones."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    found: dict[Key, ReportedContraction] = {}
    for one in contractions:
        key = one.path, one.role
        found[(*key, counts[key])] = one
        counts[key] += 1
    return found
