"""Calibration states in the collections of the calling module.

They are kept under the name given to the contraction, or a name with its axes as an
einsum equation. Two unnamed contractions of a module with equal axes are an error, so
that none share states by accident.
"""

import dataclasses
import functools
import weakref
from typing import Any

import jax
from flax import linen as nn
from flax.core import Scope

from aqtlite import config
from aqtlite.flax.linen.bare.lookup import Either
from aqtlite.flax.linen.caller import path_of
from aqtlite.program.serving import statistics_uses
from aqtlite.program.serving.contraction import Contraction
from aqtlite.quantization.states import statistics
from aqtlite.quantization.states.state_collections import (
    OF_CONVERSION,
    OF_GRADIENTS,
    PARAMETERS,
    STATISTICS,
    collections_of,
)
from aqtlite.quantization.states.statistics import States
from aqtlite.quantization.states.stored_statistics import restored_statistics

_NO_VARIABLES = (
    "a calibration that gathers statistics or is learned was called outside of a Flax "
    "module, or inside a transformation such as jax.jit within one, where no variables "
    "can be kept"
)

# For each root scope, the entries taken by unnamed contractions, and those taken for
# statistics of gradients.
_taken: weakref.WeakKeyDictionary[Scope, set[tuple[str, ...]]] = (
    weakref.WeakKeyDictionary()
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """The place of the states of a call."""

    scope: Scope
    name: str

    def name_in(self, collection: str) -> str:
        """Returns the name of the states in a collection."""
        return name_in(collection, self.name)


def name_in(collection: str, name: str) -> str:
    """Returns the name of states in a collection, with a prefix among parameters."""
    return f"aqt_{name}" if collection == PARAMETERS else name


def entry_of(call: Contraction, scope: Scope | None, number: int) -> Entry:
    """Returns the place of the states of a call.

    Args:
        call: the contraction, with a config that has states.
        scope: scope of the calling module.
        number: number of the contraction in a call of several ones.

    Raises:
        ValueError: if there is no scope, or two contractions would share the place.
    """
    if scope is None:
        raise ValueError(_NO_VARIABLES)
    name = _name_of(call, scope, number)
    if call.cfg.has_gradient_states and call.name is not None:
        what = f"uses the statistics of gradients of {name!r} twice"
        _take(scope, (OF_GRADIENTS, name), f"{what}, which would be added up")
    return Entry(scope, name)


def read(call: Contraction, entry: Entry) -> States:
    """Returns the states of a call, and initializes them where they may be created.

    Args:
        call: the contraction.
        entry: result of `entry_of`.

    Raises:
        ValueError: if there are none, and their collection is not mutable.
    """
    found: dict[str, Any] = {}
    scope = entry.scope

    @functools.cache
    def fresh() -> States:
        return statistics.init_states(call.cfg, call.lhs, call.rhs, call.operation)

    for collection, sides in collections_of(call.cfg).items():
        name = entry.name_in(collection)
        if not scope.has_variable(collection, name):
            if not scope.is_mutable_collection(collection):
                if collection == OF_GRADIENTS and not _is_initializing(scope):
                    continue  # Only needed for gradients.
                if OF_CONVERSION.issuperset(sides):
                    continue
                raise ValueError(_missing(collection, name, scope))
            _put(scope, collection, name, fresh(), sides)
        value = scope.get_variable(collection, name)
        value = restored_statistics(nn.meta.unbox(value))
        if set(sides) - set(value) and scope.is_mutable_collection(collection):
            # States gathered with another config may lack a side.
            value = {**{side: getattr(fresh(), side) for side in sides}, **value}
        found.update({side: value[side] for side in sides if side in value})
    return States(**found)


def note_uses(call: Contraction, entry: Entry, *, is_noisy: bool) -> None:
    """Records the statistics that a call reads, for a conversion.

    Args:
        call: the contraction, with the result of `read`.
        entry: result of `entry_of`.
        is_noisy: whether it rounds stochastically unless weights are frozen.
    """
    statistics_uses.note_operands(
        call,
        (*entry.scope.path, entry.name_in(STATISTICS)),
        is_updated=entry.scope.is_mutable_collection(STATISTICS),
        needs_frozen=is_noisy,
    )


def update(
    call: Contraction,
    operands: tuple[Any, Any],
    entry: Entry,
) -> States:
    """Returns states updated with this batch, if their collection is mutable.

    In `init`, the collection keeps the initial statistics; only the returned states
    include this batch.

    Args:
        call: the contraction, with the result of `read`.
        operands: its operands, or the frozen weights in their place.
        entry: result of `entry_of`.
    """
    scope, states = entry.scope, call.states
    sides = collections_of(call.cfg).get(STATISTICS)
    if sides is None or not scope.is_mutable_collection(STATISTICS):
        return states
    lhs, rhs = (x.frozen if isinstance(x, Either) else x for x in operands)
    name = f"{entry.name!r} in {path_of(scope)}"
    after = statistics.update_states(call.cfg, states, lhs, rhs, call.operation, name)
    if not _is_initializing(scope):
        _put(scope, STATISTICS, entry.name_in(STATISTICS), after, sides)
    return after


def of_output(
    tensor: config.Tensor, out: jax.Array, scope: Scope | None, name: str, *, own: bool
) -> Any:
    """Returns the statistics of a result, updated with this batch as in `update`.

    Args:
        tensor: ``cfg.out``, with a calibration that gathers statistics.
        out: the float result.
        scope: scope of the calling module.
        name: name of the contraction.
        own: whether the user gave the contraction this name.

    Raises:
        ValueError: if there are none, or two contractions would share them.
    """
    if scope is None:
        raise ValueError(_NO_VARIABLES)
    name, is_mutable = f"{name}_out", scope.is_mutable_collection(STATISTICS)
    if not own:
        _take(scope, (name,), "quantizes two results of one name")
    if not scope.has_variable(STATISTICS, name):
        if not is_mutable:
            raise ValueError(_missing(STATISTICS, name, scope))
        before = statistics.init_output(tensor, out.shape)
        scope.put_variable(STATISTICS, name, {"out": before})
    state = restored_statistics(scope.get_variable(STATISTICS, name))["out"]
    place, last = (*scope.path, name, "out"), tuple(range(out.ndim))[-1:]
    statistics_uses.note(place, out, tensor, last, "out", state, is_updated=is_mutable)
    if not is_mutable:
        return state
    after = statistics.update_output(
        tensor, state, out, f"{name!r} in {path_of(scope)}"
    )
    if not _is_initializing(scope):
        scope.put_variable(STATISTICS, name, {"out": after})
    return after


def _is_initializing(scope: Scope) -> bool:
    return bool(scope.get_flag("initializing", False))


def _put(
    scope: Scope, collection: str, name: str, states: States, sides: list[str]
) -> None:
    value = {side: getattr(states, side) for side in sides}
    scope.put_variable(collection, name, value)


def _missing(collection: str, name: str, scope: Scope) -> str:
    what, remedy = "statistics", ""
    if collection == PARAMETERS:
        what = "learned parameters"
    if collection == STATISTICS:
        remedy = (
            ", and gather statistics with aqtlite.flax.calibrate or model.apply(..., "
            f"mutable=['{STATISTICS}']), or while training"
        )
    return (
        f"{path_of(scope)} has no {what} {name!r} in the collection '{collection}': "
        f"pass all collections that model.init returns{remedy}. Operands of another "
        f"rank have {what} of their own; in nn.scan and nn.vmap lift the collection: "
        f"variable_axes={{..., '{collection}': 0}}"
    )


def _name_of(call: Contraction, scope: Scope, number: int) -> str:
    if call.name is not None:
        return call.name
    name = f"{call.operation.name}_{number}" if number else call.operation.name
    what = "makes two contractions of the same axes, whose statistics would be mixed"
    if call.cfg.has_parameters:
        what = "makes two contractions of the same axes, which would share parameters"
    _take(scope, (name,), what)
    return name


def _take(scope: Scope, entry: tuple[str, ...], what: str) -> None:
    taken, entry = _taken.setdefault(scope.root, set()), (*scope.path, *entry)
    if entry in taken:
        raise ValueError(
            f"{path_of(scope)} {what}: give each its own, with AqtDotGeneral(cfg, "
            "name=...). Calls of one name share what is kept of operands, but not "
            "statistics of gradients: name that of a layer that is called twice"
        )
    taken.add(entry)
