"""Statistics of activations in a collection, beside the module's parameters.

They are kept under the name of the contraction, or else under its axes, written as an
einsum's equation: two contractions of a module do not share statistics unawares.
"""

import string
import weakref
from typing import Any, NamedTuple

from flax.core import Scope

from aqtlite import statistics
from aqtlite.flax.linen.caller import path_of
from aqtlite.serving.contraction import Contraction
from aqtlite.serving.lookup import Either

STATISTICS = "aqt_stats"
"""The collection of the statistics of calibrations."""

# For each root scope, the entries that contractions without a name took.
_taken: weakref.WeakKeyDictionary[Scope, set[tuple[str, ...]]] = (
    weakref.WeakKeyDictionary()
)


def states(
    call: Contraction, operands: tuple[Any, Any], scope: Scope | None
) -> statistics.States | None:
    """Returns the statistics of a call; updates them if the collection is mutable.

    In `init`, the collection gets statistics of no batch, and the call its own.

    Args:
        call: the contraction.
        operands: its operands, or the frozen weights in their place.
        scope: of the calling module.

    Raises:
        ValueError: if there are no statistics, or two contractions would share them.
    """
    entry = _entry(call, scope)
    if entry is None:
        return None
    scope, name, before = entry
    if not scope.is_mutable_collection(STATISTICS):
        return before
    lhs, rhs = (x.frozen if isinstance(x, Either) else x for x in operands)
    after = statistics.update_states(call.cfg, before, lhs, rhs, call.dimension_numbers)
    if not scope.get_flag("initializing", False):
        scope.put_variable(STATISTICS, name, _as_dict(after))
    return after


def states_before(call: Contraction, scope: Scope | None) -> statistics.States | None:
    """Returns the statistics of a call, and does not update them.

    Args:
        call: the contraction.
        scope: of the calling module.

    Raises:
        ValueError: as `states`.
    """
    entry = _entry(call, scope)
    return None if entry is None else entry.states


class _Entry(NamedTuple):
    """The statistics of a contraction, and their place."""

    scope: Scope
    name: str
    states: statistics.States


def _entry(call: Contraction, scope: Scope | None) -> _Entry | None:
    """Returns the statistics of a call, made where there are none yet."""
    if not statistics.has_states(call.cfg):
        return None
    if scope is None:
        raise ValueError(
            "a calibration that gathers statistics was called outside of a Flax "
            "module, or inside a transformation such as jax.jit within one, where no "
            "variables can be kept"
        )
    name = _name_of(call, scope)
    fresh = statistics.States()
    if scope.is_mutable_collection(STATISTICS):
        fresh = statistics.init_states(
            call.cfg, call.lhs, call.rhs, call.dimension_numbers
        )
    if not scope.has_variable(STATISTICS, name):
        if not scope.is_mutable_collection(STATISTICS):
            raise ValueError(
                f"{path_of(scope)} has no statistics {name!r} in the collection "
                f"'{STATISTICS}', which model.init makes: gather some with "
                "aqtlite.flax.calibrate or model.apply(..., "
                f"mutable=['{STATISTICS}']). Operands of another rank have statistics "
                "of their own; in nn.scan and nn.vmap lift the collection: "
                f"variable_axes={{..., '{STATISTICS}': 0}}"
            )
        scope.put_variable(STATISTICS, name, _as_dict(fresh))
    # What an entry lacks (it was gathered with another config) begins anew.
    found = scope.get_variable(STATISTICS, name)
    return _Entry(scope, name, fresh._replace(**found))


def _name_of(call: Contraction, scope: Scope) -> str:
    if call.name is not None:
        return call.name
    name = f"dot_general_{_equation(call)}"
    taken, entry = _taken.setdefault(scope.root, set()), (*scope.path, name)
    if entry in taken:
        raise ValueError(
            f"{path_of(scope)} makes two contractions of the same axes, whose "
            "statistics would be mixed: give each its own, with "
            "AqtDotGeneral(cfg, name=...). Calls of one name share their statistics: "
            "name that of a layer that is called twice"
        )
    taken.add(entry)
    return name


def _equation(call: Contraction) -> str:
    """Writes the axes of a contraction as ``ab_bc``."""
    letters = iter(string.ascii_letters)
    lhs = [next(letters) for _ in range(call.lhs.ndim)]
    (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = call.dims
    paired = dict(zip(rhs_ca + rhs_ba, lhs_ca + lhs_ba, strict=True))
    rhs = [
        lhs[paired[axis]] if axis in paired else next(letters)
        for axis in range(call.rhs.ndim)
    ]
    return f"{''.join(lhs)}_{''.join(rhs)}"


def _as_dict(states: statistics.States) -> dict[str, Any]:
    return {name: state for name, state in states._asdict().items() if state != ()}
