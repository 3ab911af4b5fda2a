"""A quantized einsum."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from aqtlite import config
from aqtlite.contraction import einsum_equation, einsum_path
from aqtlite.contraction.contract import Options, as_operand, contract
from aqtlite.contraction.einsum_path import Step
from aqtlite.operations import DotGeneral
from aqtlite.qtensor.qtensor import Operand, QTensor
from aqtlite.quantization.states.statistics import States
from aqtlite.shapes.dimension_numbers import Axes


def einsum(
    eqn: str,
    *operands: Any,
    cfg: config.DotGeneral | None,
    key: jax.Array | None = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    states: States | Sequence[States] | None = None,
) -> jax.Array | QTensor:
    """Evaluates an einsum with quantized contractions.

    Three and more operands are contracted two at a time, in the order of `opt_einsum`
    (as by `jnp.einsum`), each time with `cfg`: of the two, the one that comes first in
    the equation is lhs, and a result stands where its first operand stood. Products in
    between that sum nothing are not quantized.

    Args:
        eqn: any equation that `jnp.einsum` takes for two or more operands: with an
            ellipsis; with letters repeated in one operand (a diagonal), summed over in
            one operand, or of size one in one operand; with or without ``->``.
        *operands: floating, or `QTensor`s. Of two, ``cfg.fwd.lhs`` is the config of the
            first, whatever the order in which the contraction runs, and ``cfg.fwd.rhs``
            that of the second.
        cfg: what to quantize. None contracts in floating point.
        key: as for the function that `make_dot_general` returns.
        preferred_element_type: the dtype of the output.
        out_sharding: sharding of the output, a `NamedSharding` or a `PartitionSpec`, as
            in `jnp.einsum`.
        states: states of calibrations that gather statistics or are learned, as made by
            `aqtlite.einsum_states`: for the operands of the contraction, and for the
            result of the equation; with three and more operands a sequence, one for
            each contraction.

    Returns:
        An array of the shape and dtype of ``jnp.einsum(eqn, *operands)``; where
        ``cfg.out`` quantizes the result, a `QTensor` with the axes of the equation.

    Raises:
        ValueError: if the equation does not fit operands of these shapes, or if there
            is another number of states than of contractions.
        TypeError: if `cfg` quantizes and an operand is not floating, or if the equation
            takes the diagonal of a `QTensor` or sums over an axis that only it has.

    >>> x, w = jnp.ones((2, 3, 4)), jnp.ones((4, 5))
    >>> einsum("...k,kn->...n", x, w, cfg=config.fully_quantized()).shape
    (2, 3, 5)
    >>> a, b = jnp.ones((4, 1)), jnp.ones((1, 5))
    >>> einsum("...k,kr,rn->...n", x, a, b, cfg=config.fully_quantized()).shape
    (2, 3, 5)
    """
    arrays = as_operands(operands)
    steps = einsum_path.steps_of(eqn, arrays)
    of_steps = einsum_path.states_of_steps(eqn, states, len(steps))

    def run(number: int, step: Step, lhs: Any, rhs: Any) -> jax.Array | QTensor:
        lhs, rhs, operation, order = as_dot_general(step.equation, lhs, rhs)
        options = Options(
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding if step.is_last else None,
            key=einsum_path.key_of_step(key, number),
            states=of_steps[number],
            order=order,
        )
        return contract(step.config_of(cfg), operation, lhs, rhs, options)

    return einsum_path.contracted(steps, arrays, run)


def as_operands(operands: Sequence[Any]) -> list[Operand]:
    """Returns operands as arrays or `QTensor`s; raises TypeError for others."""
    if len(operands) == 2:
        return [as_operand(operands[0], "fwd.lhs"), as_operand(operands[1], "fwd.rhs")]
    return [as_operand(x, f"operand {number}") for number, x in enumerate(operands)]


def as_dot_general(
    eqn: str, lhs: Any, rhs: Any
) -> tuple[Operand, Operand, DotGeneral, Axes]:
    """Returns the contraction to which an einsum of two operands reduces.

    Returns:
        The operands of the equation, without the axes that take no part in the
        contraction; the contraction; and the permutation of the axes of its result.
    """
    (lhs_names, rhs_names), out_names = einsum_equation.parse(eqn, (lhs, rhs))
    lhs, lhs_names = _drop_singletons(lhs, lhs_names, rhs, rhs_names)
    rhs, rhs_names = _drop_singletons(rhs, rhs_names, lhs, lhs_names)
    lhs, lhs_names = _keep_distinct(lhs, lhs_names, rhs_names + out_names)
    rhs, rhs_names = _keep_distinct(rhs, rhs_names, lhs_names + out_names)
    shared = [name for name in lhs_names if name in rhs_names]
    batch = [name for name in shared if name in out_names]
    contracting = [name for name in shared if name not in out_names]
    dims = (
        _axes(contracting, lhs_names, rhs_names),
        _axes(batch, lhs_names, rhs_names),
    )
    names = batch + [
        name for name in lhs_names + rhs_names if name not in batch + contracting
    ]
    order = tuple(names.index(name) for name in out_names)
    return lhs, rhs, DotGeneral(dims, lhs.ndim, rhs.ndim), order


def _axes(names: list[str], lhs_names: str, rhs_names: str) -> tuple[Axes, Axes]:
    return tuple(map(lhs_names.index, names)), tuple(map(rhs_names.index, names))


def _drop_singletons(x, names, other, other_names):
    """Drops axes of size one that the other operand has in full."""
    axes = [
        axis
        for axis, name in enumerate(names)
        if x.shape[axis] == 1
        and name in other_names
        and other.shape[other_names.index(name)] != 1
    ]
    if not axes:  # A `QTensor` stays as it is stored.
        return x, names
    kept = "".join(name for axis, name in enumerate(names) if axis not in axes)
    return x.squeeze(axes), kept


def _keep_distinct(x, names, wanted):
    """Takes diagonals, and sums over letters that nothing else names."""
    kept = "".join(dict.fromkeys(name for name in names if name in wanted))
    if kept == names:
        return x, names
    if isinstance(x, QTensor):
        raise TypeError(
            f"an einsum takes the axes {names!r} of a QTensor of shape {x.shape}, of "
            f"which {kept!r} are contracted or kept: diagonals and sums have other "
            "scales. Give the result of .dequant() instead"
        )
    return jnp.einsum(f"{names}->{kept}", x), kept
