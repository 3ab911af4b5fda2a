"""Changes to fields of a config, by path."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from aqtlite.config import representation
from aqtlite.config.blocks import LocalAqt
from aqtlite.config.dot_general import DotGeneral, DotGeneralRaw
from aqtlite.config.smoothing import Smoothing
from aqtlite.config.tensor import Tensor

Config = TypeVar("Config", DotGeneral, DotGeneralRaw, Tensor, LocalAqt, Smoothing)


def update(cfg: Config, changes: Mapping[str, Any]) -> Config:
    """Returns a copy of `cfg` with new values at the given paths.

    A path is a chain of field names, which may lead into numerics and calibrations.
    ``*`` matches every field at that step; fields without the rest of the path are
    skipped. Changes are applied in order, so later ones override earlier ones, and the
    result is validated once, after all changes.

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
        if not _set(draft, path.split("."), value, (), misses):
            raise ValueError(_matches_nothing(path, misses))
    closed: Config = _close(draft, ())
    return closed


@dataclasses.dataclass
class _Draft:
    """The fields of a dataclass, not validated until `_close` builds it."""

    cls: type
    values: dict[str, Any]


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
    values = {name: _close(item, (*where, name)) for name, item in draft.values.items()}
    try:
        return draft.cls(**values)
    except TypeError as error:
        raise TypeError(_located(where, error)) from error
    except ValueError as error:
        raise ValueError(_located(where, error)) from error


def _located(where: tuple[str, ...], error: Exception) -> str:
    return f"{'.'.join(where)}: {error}" if where else str(error)


def _set(
    draft: Any,
    steps: list[str],
    value: Any,
    where: tuple[str, ...],
    misses: list[_Miss],
) -> bool:
    """Sets `value` wherever `steps` match; returns whether they matched anywhere."""
    step, rest = steps[0], steps[1:]
    names = list(draft.values) if isinstance(draft, _Draft) else []
    matching = names if step == "*" else [step] if step in names else []
    if not matching:
        misses.append(_Miss(where, step, names))
        return False
    if not rest:
        draft.values.update(dict.fromkeys(matching, value))
        return True
    found = False
    for name in matching:
        inner = _open(draft.values[name])
        if _set(inner, rest, value, (*where, name), misses):
            draft.values[name] = inner
            found = True
    return found


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
