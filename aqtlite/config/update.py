"""Changes to fields of a config, by path."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from aqtlite.config import representation, tensor_checks
from aqtlite.config.blocks import LocalAqt
from aqtlite.config.dot_general import DotGeneral, DotGeneralRaw
from aqtlite.config.smoothing import Smoothing
from aqtlite.config.tensor import Tensor
from aqtlite.numerics import NoNumerics

Config = TypeVar("Config", DotGeneral, DotGeneralRaw, Tensor, LocalAqt, Smoothing)


def update(cfg: Config, changes: Mapping[str, Any]) -> Config:
    """Returns a copy of `cfg` with new values at the given paths.

    A path is a chain of field names, which may lead into numerics and calibrations.
    ``*`` matches every field at that step; fields without the rest of the path are
    skipped, and so are operands without a grid where only a grid has what the path
    names, such as `scale_dtype`. Changes are applied in order, so later ones override
    earlier ones, and the result is validated once, after all changes.

    >>> from aqtlite import calibration, config, numerics
    >>> cfg = config.fully_quantized(fwd_bits=8, bwd_bits=None)
    >>> cfg = update(cfg, {
    ...     "fwd.rhs.numerics": numerics.IntSymmetric(bits=4),
    ...     "fwd.*.calibration": calibration.AbsMax(clipping_scale=0.9),
    ...     "fwd.*.numerics.clip_gradient": True,
    ... })
    >>> cfg.fwd.rhs.numerics
    IntSymmetric(bits=4, preserve_zero=True, preserve_max_val=False, clip=True, \
clip_gradient=True, stochastic_rounding=False)
    >>> update(cfg, {"fwd.rsh.po2_scale": True})
    Traceback (most recent call last):
    ...
    ValueError: update path 'fwd.rsh.po2_scale' matches nothing: fwd has no field \
'rsh'; its fields are: lhs, rhs, dg_in_dtype, dg_accumulator_dtype, local_aqt, \
smoothing, rotation. Did you mean 'rhs'?

    Args:
        cfg: any config dataclass; not modified.
        changes: mapping from paths to new values.

    Returns:
        Config of the same type. Fields derived from others at construction (such as
        ``IntSymmetric.preserve_zero`` from `bits`) are derived again.

    Raises:
        TypeError: if `cfg` is not a config, `changes` is not a mapping with string
            keys, or a value has the wrong type for its field.
        ValueError: if a path matches nothing, or if the result is not valid.
    """
    if not isinstance(cfg, DotGeneral | DotGeneralRaw | Tensor | LocalAqt | Smoothing):
        raise TypeError(f"update needs a config such as DotGeneral, got {cfg!r}")
    if not isinstance(changes, Mapping):
        raise TypeError(f"changes must map paths to values, got {changes!r}")
    draft = _open(cfg)
    for path, value in changes.items():
        if not isinstance(path, str):
            raise TypeError(f"an update path must be a string, got {path!r}")
        misses: list[_Miss] = []
        places = _places(draft, path.split("."), (), misses)
        if not places:
            raise ValueError(_matches_nothing(path, misses))
        for place in places:
            place.set(value, is_named="*" not in path)
    for path in changes:
        places = _places(draft, path.split("."), (), [])
        if places and all(place.is_skipped for place in places):
            raise ValueError(_has_no_grid(path, places))
    closed: Config = _close(draft, ())
    return closed


@dataclasses.dataclass
class _Draft:
    """The fields of a dataclass, not validated until `_close` builds it."""

    cls: type
    values: dict[str, Any]
    before: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Values before a ``*`` reached fields that keep them without a grid."""

    @property
    def has_no_grid(self) -> bool:
        """Whether it is an operand that stays in float."""
        grid = self.values.get("numerics")
        cls = grid.cls if isinstance(grid, _Draft) else type(grid)
        return self.cls is Tensor and cls is NoNumerics


@dataclasses.dataclass
class _Place:
    """A field that a path names."""

    where: tuple[str, ...]
    draft: _Draft
    name: str

    def set(self, value: Any, is_named: bool) -> None:
        """Sets the field; one that a ``*`` reached, only if it has an effect."""
        values, before = self.draft.values, self.draft.before
        is_set = value is not None and value is not False
        is_of_grid = self.name in tensor_checks.OF_GRID
        is_optional = is_of_grid or self.name == "use_fwd_quant"
        is_as_it_was = is_optional and not is_set and values[self.name] == value
        if not is_named and ((is_of_grid and is_set) or is_as_it_was):
            before.setdefault(self.name, values[self.name])
        else:
            before.pop(self.name, None)
        values[self.name] = value

    @property
    def is_skipped(self) -> bool:
        """Whether the field keeps its value, as there is no grid."""
        return self.draft.has_no_grid and self.name in self.draft.before


@dataclasses.dataclass
class _Miss:
    """A place at which a path stopped matching."""

    where: tuple[str, ...]
    step: str
    candidates: list[str]


def _open(value: Any) -> Any:
    """Makes a draft of a dataclass, one level deep; returns other values unchanged."""
    if isinstance(value, _Draft) or not representation.is_record(value):
        return value
    return _Draft(type(value), representation.constructor_arguments(value))


def _close(draft: Any, where: tuple[str, ...]) -> Any:
    if not isinstance(draft, _Draft):
        return draft
    skipped = draft.before if draft.has_no_grid else {}
    values = {
        name: _close(item, (*where, name))
        for name, item in {**draft.values, **skipped}.items()
    }
    try:
        return draft.cls(**values)
    except TypeError as error:
        raise TypeError(_located(where, error)) from error
    except ValueError as error:
        raise ValueError(_located(where, error)) from error


def _located(where: tuple[str, ...], error: Exception) -> str:
    return f"{'.'.join(where)}: {error}" if where else str(error)


def _places(
    draft: Any, steps: list[str], where: tuple[str, ...], misses: list[_Miss]
) -> list[_Place]:
    """Returns the fields that `steps` match, and opens the drafts that have them."""
    step, rest = steps[0], steps[1:]
    names = list(draft.values) if isinstance(draft, _Draft) else []
    matching = names if step == "*" else [step] if step in names else []
    if not matching:
        misses.append(_Miss(where, step, names))
        return []
    if not rest:
        return [_Place(where, draft, name) for name in matching]
    found = []
    for name in matching:
        inner = _open(draft.values[name])
        places = _places(inner, rest, (*where, name), misses)
        if places:
            draft.values[name] = inner
            found += places
    return found


def _has_no_grid(path: str, places: list[_Place]) -> str:
    """The error message for a path that only leads to operands without a grid."""
    operands = " and ".join(".".join(place.where) for place in places)
    return (
        f"update path {path!r} matches nothing: {operands} would not change, because "
        "nothing is quantized there; set numerics"
    )


def _matches_nothing(path: str, misses: list[_Miss]) -> str:
    """The error message for a path, from the deepest misses."""
    furthest = max(len(miss.where) for miss in misses)
    # Among several branches of a `*`, prefer those with fields to suggest.
    deepest = [miss for miss in misses if len(miss.where) == furthest]
    telling = [miss for miss in deepest if miss.candidates] or deepest
    places = " and ".join(".".join(miss.where) or "the config" for miss in telling)
    names = list(dict.fromkeys(name for miss in telling for name in miss.candidates))
    start = f"update path {path!r} matches nothing: {places}"
    have, their = ("have", "their") if len(telling) > 1 else ("has", "its")
    step = telling[0].step
    if not names:
        return f"{start} {have} no fields, so {step!r} cannot follow"
    message = f"{start} {have} no field {step!r}; {their} fields are: "
    message += ", ".join(names)
    close = difflib.get_close_matches(step, names, n=1)
    return f"{message}. Did you mean {close[0]!r}?" if close else message
