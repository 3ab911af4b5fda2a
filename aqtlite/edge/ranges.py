"""Ranges of a program's values, as a table that people can read and edit."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import rich.box
import rich.table

from aqtlite.config.json import json_text
from aqtlite.edge.publish import publish
from aqtlite.output.files import check_target


class Range(NamedTuple):
    """Smallest and largest value that a grid has to represent."""

    low: float
    high: float


_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Ranges(Mapping[str, Range]):
    """Ranges of a program's values, by name.

    The name of a value consists of the name scopes around its operator, and the name of
    the operator. Values on one grid, such as the inputs of a concatenation, have a
    single entry.

    >>> ranges = Ranges({"input": (0, 1), "MLP/Dense_0/fully_connected": (-4.5, 7)})
    >>> ranges["input"]
    Range(low=0.0, high=1.0)
    >>> Ranges.from_json(ranges.to_json()) == ranges
    True
    >>> ranges.replace({"input": (-1, 1)})["input"]
    Range(low=-1.0, high=1.0)

    Raises:
        TypeError: if `of_values` is not a mapping from strings to pairs of numbers.
        ValueError: if a range is not finite, or its ends are in the wrong order.
    """

    of_values: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.of_values, Mapping):
            raise TypeError(
                "ranges are a mapping from names of values to (low, high), got "
                f"{self.of_values!r}"
            )
        checked = {name: _checked(name, x) for name, x in self.of_values.items()}
        object.__setattr__(self, "of_values", checked)

    def __getitem__(self, name: str) -> Range:
        found: Range = self.of_values[name]
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.of_values)

    def __len__(self) -> int:
        return len(self.of_values)

    def replace(self, changed: Mapping[str, Any]) -> "Ranges":
        """Returns a copy of the table with some ranges replaced.

        Raises:
            ValueError: if a name is not in the table.
        """
        unknown = sorted(set(changed) - set(self.of_values))
        if unknown:
            raise ValueError(
                f"there is no value {unknown[0]!r}; the values are "
                f"{', '.join(self.of_values)}"
            )
        return Ranges({**self.of_values, **changed})

    def to_json(self, *, indent: int | None = 2) -> str:
        """Writes the table as JSON."""
        rows = {name: {"low": one.low, "high": one.high} for name, one in self.items()}
        return json.dumps({"version": _VERSION, "ranges": rows}, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> "Ranges":
        """Reads what `to_json` wrote.

        Raises:
            TypeError: if `text` is not a string.
            ValueError: if `text` is not such a table; the message names the place.
        """
        what = 'an object with "version" and "ranges"'
        data = json_text.versioned(json_text.read(text), _VERSION, what)
        if set(data) != {"ranges"} or not isinstance(data["ranges"], dict):
            json_text.fail("$", f"expected {what}, and an object at $.ranges")
        ranges = {}
        for name, one in data["ranges"].items():
            if not isinstance(one, dict) or set(one) != {"low", "high"}:
                raise ValueError(
                    f'$.ranges[{name!r}]: expected an object with "low" and "high", '
                    f"got {one!r:.200}"
                )
            ranges[name] = (one["low"], one["high"])
        try:
            return cls(ranges)
        except (TypeError, ValueError) as error:
            raise ValueError(f"$.ranges: {error}") from error

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the table to a JSON file, atomically.

        Raises:
            ValueError: if `path` is an address such as ``gs://bucket/ranges.json``, or
                a symbolic link.
        """
        check_target(path)
        publish((self.to_json() + "\n").encode(), path)

    @classmethod
    def load(cls, path: str | pathlib.Path) -> "Ranges":
        """Reads a table from a JSON file.

        Raises:
            ValueError: if the file does not hold a table.
        """
        text = pathlib.Path(path).read_text(encoding="utf-8")
        try:
            return cls.from_json(text)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error

    def __rich__(self) -> rich.table.Table:
        table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
        table.add_column("value", overflow="fold")
        for name in ("low", "high"):
            table.add_column(name, justify="right")
        for value, one in self.items():
            table.add_row(value, f"{one.low:.6g}", f"{one.high:.6g}")
        return table


def _checked(name: Any, value: Any) -> Range:
    if not isinstance(name, str):
        raise TypeError(f"names of values are strings, got {name!r}")
    try:
        low, high = value
        if any(isinstance(end, str | bytes | bool) for end in (low, high)):
            raise TypeError("an end is a text or a bool")
        found = Range(float(low), float(high))
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"the range of {name!r} must be two numbers (low, high), got {value!r}"
        ) from error
    if not (math.isfinite(found.low) and math.isfinite(found.high)):
        raise ValueError(f"the range of {name!r} is not finite: {value!r}")
    if found.low > found.high:
        raise ValueError(
            f"the range of {name!r} begins above its end: {found.low} > {found.high}"
        )
    return found
