"""A quantized einsum of two operands."""

from typing import Any

import jax
import jax.numpy as jnp
import opt_einsum

from aqtlite import config
from aqtlite.contraction.contract import Options, as_operands, contract
from aqtlite.operations import DotGeneral
from aqtlite.qtensor.qtensor import Operand, QTensor
from aqtlite.quantization.statistics import States
from aqtlite.shapes.dimension_numbers import Axes


def einsum(
    eqn: str,
    lhs: Any,
    rhs: Any,
    *,
    cfg: config.DotGeneral | None,
    key: jax.Array | None = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    states: States | None = None,
) -> jax.Array | QTensor:
    """Evaluates a two-operand einsum with a quantized contraction.

    Args:
        eqn: any equation that `jnp.einsum` takes for two operands: with an ellipsis;
            with letters repeated in one operand (a diagonal), summed over in one
            operand, or of size one in one operand; with or without ``->``.
        lhs: floating, or a `QTensor`; ``cfg.fwd.lhs`` is its config, whatever the order
            in which the contraction runs.
        rhs: floating, or a `QTensor`; ``cfg.fwd.rhs`` is its config.
        cfg: what to quantize. None contracts in floating point.
        key: as for the function that `make_dot_general` returns.
        preferred_element_type: the dtype of the output.
        out_sharding: sharding of the output, a `NamedSharding` or a `PartitionSpec`, as
            in `jnp.einsum`.
        states: states of calibrations that gather statistics or are learned, as made by
            `aqtlite.einsum_states`: for the operands of the contraction, and for the
            result of the equation.

    Returns:
        An array of the shape and dtype of ``jnp.einsum(eqn, lhs, rhs)``; where
        ``cfg.out`` quantizes the result, a `QTensor` with the axes of the equation.

    Raises:
        ValueError: if the equation does not fit two operands of these shapes.
        TypeError: if `cfg` quantizes and an operand is not floating, or if the equation
            takes the diagonal of a `QTensor` or sums over an axis that only it has.

    >>> x, w = jnp.ones((2, 3, 4)), jnp.ones((4, 5))
    >>> einsum("...k,kn->...n", x, w, cfg=config.fully_quantized()).shape
    (2, 3, 5)
    """
    lhs, rhs, operation, order = as_dot_general(eqn, lhs, rhs)
    options = Options(
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        key=key,
        states=states,
        order=order,
    )
    return contract(cfg, operation, lhs, rhs, options)


def as_dot_general(
    eqn: str, lhs: Any, rhs: Any
) -> tuple[Operand, Operand, DotGeneral, Axes]:
    """Returns the contraction to which an einsum reduces.

    Returns:
        The operands of the equation, without the axes that take no part in the
        contraction; the contraction; and the permutation of the axes of its result.
    """
    lhs, rhs = as_operands(lhs, rhs)
    lhs_names, rhs_names, out_names = _parse(eqn, lhs, rhs)
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


def _parse(eqn: str, lhs: jax.Array, rhs: jax.Array) -> tuple[str, str, str]:
    """The letters of both operands and of the output, with ellipses expanded."""
    if not isinstance(eqn, str):
        raise TypeError(f"eqn must be a string, got {type(eqn).__name__}")
    if eqn.count(",") != 1:
        raise ValueError(
            f"einsum equation {eqn!r} has {eqn.count(',') + 1} operands; a quantized "
            "einsum takes two"
        )
    try:
        inputs, out_names, _ = opt_einsum.parser.parse_einsum_input(
            (eqn, lhs.shape, rhs.shape), shapes=True
        )
    except ValueError as error:
        raise ValueError(
            f"einsum equation {eqn!r} does not fit operands of shapes {lhs.shape} and "
            f"{rhs.shape}: {error}"
        ) from error
    lhs_names, rhs_names = inputs.split(",")
    sizes: dict[str, int] = {}
    for names, shape in ((lhs_names, lhs.shape), (rhs_names, rhs.shape)):
        if len(names) != len(shape):
            raise ValueError(
                f"einsum equation {eqn!r} names {len(names)} axes of an operand of "
                f"shape {shape}"
            )
        for name, size in zip(names, shape, strict=True):
            if sizes.setdefault(name, size) != size and 1 not in (sizes[name], size):
                raise ValueError(
                    f"einsum equation {eqn!r}: axis {name!r} has size {sizes[name]} "
                    f"and size {size} in operands of shapes {lhs.shape} and {rhs.shape}"
                )
            sizes[name] = max(sizes[name], size)
    if len(set(out_names)) != len(out_names):
        raise ValueError(f"einsum equation {eqn!r} names an output axis twice")
    return lhs_names, rhs_names, out_names


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
