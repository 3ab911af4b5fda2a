"""Loops of small programs, which take longer divided among threads than on one."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from jax.extend import core

from aqtlite.jaxpr import analysis, equations
from aqtlite.lowering import target

UNDIVIDED = {"xla_disable_hlo_passes": "cpu-parallel-task-assigner"}
"""Options for XLA:CPU by which loops run on one thread. Bits stay what they are.

Products of matrices choose their threads themselves, with any options. XLA divides
loops of more than one operation per byte from 4,096 elements on, as rounding is, which
takes 2 to 30 us, and on one thread 1.
"""

# On two threads, served layers of 64 x 512 values take 0.54 of the time, and of
# 256 x 512 1.04; a GELU of 64 x 1024 values makes its block slower, by 1.15.
_FEW = 2**15

# They read weights and choose their threads themselves.
_PRODUCTS = {"dot_general", "ragged_dot_general", "ffi_call"}

# They compute nothing: XLA fuses them into the loops that read them, or copies.
_MOVES = {
    "bitcast_convert_type",
    "broadcast_in_dim",
    "concatenate",
    "dynamic_slice",
    "gather",
    "name",
    "reshape",
    "slice",
    "squeeze",
    "stop_gradient",
}

# Their bodies have the loops.
_WITH_BODIES = {"cond", "scan", "while", target.PRIMITIVE}


def options_for(closed: core.ClosedJaxpr) -> dict[str, str]:
    """Returns the compiler options with which a program runs fastest on a CPU.

    Args:
        closed: program for one CPU.

    Returns:
        `UNDIVIDED` if no loop reads or writes an array of more than 2^15 elements, and
        there are no convolutions of floats, some of which are loops of many operations;
        otherwise no options. Weights count where a loop reads them, and not where a
        product does.
    """
    return options_for_equations(_read_equations(closed))


def _read_equations(closed: core.ClosedJaxpr) -> Iterator[Any]:
    """Yields the equations whose results are read, those of bodies included.

    XLA drops others. What decoded a weight that is packed now is among them.
    """
    read = {*map(id, closed.jaxpr.outvars)}
    for eqn in reversed(closed.jaxpr.eqns):
        if eqn.effects or not read.isdisjoint(map(id, eqn.outvars)):
            read.update(map(id, _read_by(eqn)))
            yield eqn
            for body in equations.bodies(eqn):
                yield from _read_equations(body)


def _read_by(eqn: Any) -> list[Any]:
    """Returns the inputs that an equation reads; of a call, those that its body does.

    That of a function with a gradient of its own has inputs for the gradient alone.
    """
    if equations.called_body(eqn) is None:
        return list(eqn.invars)
    read = frozenset().union(*analysis.equation_dependencies(eqn))
    return [eqn.invars[i] for i in read]


def options_for_equations(eqns: Iterable[Any]) -> dict[str, str]:
    """Returns the options for a program of these equations, as `options_for`."""
    return UNDIVIDED if all(map(_is_small, eqns)) else {}


def _is_small(eqn: Any) -> bool:
    name = eqn.primitive.name
    if name in _MOVES or name in _WITH_BODIES or equations.called_body(eqn) is not None:
        return True
    read = () if name in _PRODUCTS else eqn.invars
    sizes = [math.prod(atom.aval.shape) for atom in (*read, *eqn.outvars)]
    return name != "conv_general_dilated" and max(sizes, default=0) <= _FEW
