"""Loops of small programs, which take longer divided among threads than on one."""

import math
from collections.abc import Iterable
from typing import Any

from jax.extend import core

from aqtlite.jaxpr import equations

UNDIVIDED = {"xla_disable_hlo_passes": "cpu-parallel-task-assigner"}
"""Options for XLA:CPU by which loops run on one thread. Bits stay what they are.

Products of matrices choose their threads themselves, with any options. XLA divides
loops of more than one operation per byte from 4,096 elements on, as rounding is, which
takes 2 to 30 us, and on one thread 1.
"""

# On two threads, layers of 256 x 128 gain 0.2 of a step, and those of 256 x 256 lose.
_FEW = 2**15


def options_for(closed: core.ClosedJaxpr) -> dict[str, str]:
    """Returns the compiler options with which a program runs fastest on a CPU.

    Args:
        closed: program for one CPU.

    Returns:
        `UNDIVIDED` if no array has more than 2^15 elements, weights included, and there
        are no convolutions of floats, some of which are loops of many operations;
        otherwise no options.
    """
    return options_for_equations(equations.with_bodies(closed))


def options_for_equations(eqns: Iterable[Any]) -> dict[str, str]:
    """Returns the options for a program of these equations, as `options_for`."""
    return UNDIVIDED if all(map(_is_small, eqns)) else {}


def _is_small(eqn: Any) -> bool:
    sizes = [math.prod(atom.aval.shape) for atom in (*eqn.invars, *eqn.outvars)]
    is_loop = eqn.primitive.name == "conv_general_dilated"
    return not is_loop and max(sizes, default=0) <= _FEW
