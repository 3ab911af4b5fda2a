"""An einsum of any number of operands as contractions of two."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import opt_einsum

from aqtlite import config
from aqtlite.contraction import einsum_equation
from aqtlite.quantization.states.statistics import States


class Step(NamedTuple):
    """One contraction of two operands."""

    equation: str
    lhs: int
    """Number of its first operand in the equation; results have the number of theirs
    that comes first."""

    rhs: int
    is_last: bool
    sums: bool
    """Whether it sums anything. What does not is a product, and no contraction."""

    def config_of(self, cfg: config.DotGeneral | None) -> config.DotGeneral | None:
        """Returns its config: only the last one quantizes the result."""
        if cfg is None:
            return None
        own = cfg if self.sums else config.DotGeneral(out=cfg.out)
        return own if self.is_last else own.with_float_out()


def steps_of(eqn: str, operands: Sequence[Any]) -> list[Step]:
    """Returns the contractions of an equation, in the order of `opt_einsum`.

    >>> import numpy as np
    >>> x, a, b = np.ones((8, 4)), np.ones((4, 1)), np.ones((1, 4))
    >>> [step.equation for step in steps_of("nd,dr,rk->nk", (x, a, b))]
    ['nd,dr->nr', 'nr,rk->nk']

    Args:
        eqn: the equation.
        operands: arrays or `QTensor`s, at least two.

    Raises:
        TypeError: if `eqn` is no string.
        ValueError: if the equation does not fit the operands.
    """
    names, out = einsum_equation.parse(eqn, operands)
    if len(operands) == 2:
        return [Step(eqn, 0, 1, is_last=True, sums=True)]
    left = dict(enumerate(names))
    expanded = f"{','.join(names)}->{out}"
    shapes = [x.shape for x in operands]
    path, _ = opt_einsum.contract_path(expanded, *shapes, shapes=True, optimize="auto")
    numbers, steps = list(left), []
    for places in path:
        lhs, rhs = sorted(numbers[place] for place in places)
        numbers = [number for number in numbers if number not in (lhs, rhs)] + [lhs]
        first, second = left.pop(lhs), left.pop(rhs)
        wanted = {*out, *"".join(left.values())}
        letters = dict.fromkeys(first + second)
        kept = "".join(letter for letter in letters if letter in wanted)
        is_last = not left
        left[lhs] = out if is_last else kept
        equation = f"{first},{second}->{left[lhs]}"
        sums = bool({*first} & {*second} - wanted)
        steps.append(Step(equation, lhs, rhs, is_last, sums))
    return steps


def contracted(
    steps: Sequence[Step],
    operands: Sequence[Any],
    contract: Callable[[int, Step, Any, Any], Any],
) -> Any:
    """Evaluates the steps of an equation, one after another.

    Args:
        steps: result of `steps_of`.
        operands: arrays or `QTensor`s.
        contract: function from the number of a step, the step, and its operands to its
            result.
    """
    values = dict(enumerate(operands))
    for number, step in enumerate(steps):
        lhs, rhs = values.pop(step.lhs), values.pop(step.rhs)
        values[step.lhs] = contract(number, step, lhs, rhs)
    (result,) = values.values()
    return result


def key_of_step(key: jax.Array | None, number: int) -> jax.Array | None:
    """Returns the key of a step: that of the einsum for the first one."""
    return key if key is None or number == 0 else jax.random.fold_in(key, number)


def states_of_steps(eqn: str, states: Any, count: int) -> Sequence[Any]:
    """Returns the states of each step.

    Args:
        eqn: the equation.
        states: `States` of a single step, a sequence of several ones, or None.
        count: number of steps.

    Raises:
        ValueError: if there is another number of them.
    """
    if states is None or count == 1:
        return [states] * count
    if isinstance(states, States) or len(states) != count:
        given = 1 if isinstance(states, States) else len(states)
        raise ValueError(
            f"einsum equation {eqn!r} is {count} contractions, and states= has those "
            f"of {given}: aqtlite.einsum_states makes them"
        )
    return states
