"""The equations of a jaxpr that contract, as calls of quantized functions."""

import math
import string
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from aqtlite import config, operations
from aqtlite.config import DotGeneral, arithmetic
from aqtlite.contraction import contract as contraction
from aqtlite.contraction import ragged_dot
from aqtlite.operations import Operation
from aqtlite.quantization.statistics import States


def why_not_quantized(eqn: Any) -> str | None:
    """Returns why an equation cannot be quantized, or None if it can.

    Args:
        eqn: equation of one of the primitives in `registry.OF_PRIMITIVES`.
    """
    lhs, rhs = (atom.aval for atom in eqn.invars[:2])
    for aval in (lhs, rhs):
        if not jnp.issubdtype(aval.dtype, jnp.floating):
            return f"it contracts {aval.dtype.name}, and only floats are quantized"
    if 0 in (*lhs.shape, *rhs.shape):
        return "an operand is empty"
    if eqn.primitive.name == "ragged_dot_general":
        dims = eqn.params["ragged_dot_dimension_numbers"]
        found = (
            dims.dot_dimension_numbers,
            tuple(dims.lhs_ragged_dimensions),
            tuple(dims.rhs_group_dimensions),
        )
        if found != ((((1,), (1,)), ((), ())), (0,), (0,)) or (
            eqn.params["group_offset"] is not None
        ):
            return "it is a ragged_dot_general of other axes than lax.ragged_dot's"
    return None


def operation_of(eqn: Any, values: Sequence[Any], *, exchanged: bool) -> Operation:
    """The operation of an equation.

    Args:
        eqn: the equation.
        values: its inputs.
        exchanged: a `dot_general` is to have its operands the other way round.
    """
    lhs, rhs, *rest = values
    if eqn.primitive.name == "dot_general":
        dims = eqn.params["dimension_numbers"]
        if exchanged:
            lhs, rhs, dims = rhs, lhs, _exchanged(dims)
        return operations.DotGeneral.of(dims, lhs.shape, rhs.shape)
    if eqn.primitive.name == "conv_general_dilated":
        return operations.ConvGeneralDilated.of(
            lhs.shape, rhs.shape, *_geometry(eqn.params)
        )
    return ragged_dot.ragged_operation(lhs, rhs, rest[0])


def name_of(eqn: Any, avals: Sequence[Any], *, exchanged: bool) -> str:
    """The name of the operation of an equation, by which its states are kept.

    Args:
        eqn: the equation.
        avals: the types of its inputs.
        exchanged: as for `operation_of`.
    """
    if eqn.primitive.name == "ragged_dot_general":
        return "ragged_dot"
    return operation_of(eqn, avals, exchanged=exchanged).name


def in_float(eqn: Any, values: Sequence[Any]) -> list[jax.Array]:
    """Evaluates a contraction as it was.

    Args:
        eqn: the equation.
        values: its inputs.
    """
    return [contract(eqn, config.unquantized(), values, States(), exchanged=False)]


def contract(
    eqn: Any,
    cfg: DotGeneral,
    values: Sequence[Any],
    states: States,
    *,
    exchanged: bool,
) -> jax.Array:
    """Evaluates an equation as a quantized contraction.

    Args:
        eqn: the equation.
        cfg: its config.
        values: its inputs, of which the first two may be exchanged, and `QTensor`s.
        states: states of the calibrations.
        exchanged: they are: the first one is the rhs of the equation.
    """
    lhs, rhs, *rest = values
    own = (rhs, lhs, *rest) if exchanged else values
    operation = operation_of(eqn, own, exchanged=exchanged)
    takes_precision = not cfg.is_quantized or (
        operation.takes_precision and arithmetic.contracts_floats(cfg)
    )
    options = contraction.Options(
        precision=eqn.params["precision"] if takes_precision else None,
        preferred_element_type=eqn.outvars[0].aval.dtype,
        out_sharding=eqn.params["out_sharding"],
        states=states,
        order=_order(eqn, lhs.ndim) if exchanged else None,
    )
    out = contraction.contract(cfg, operation, lhs, rhs, options)
    return cast(jax.Array, out)  # Rules quantize no results.


def _order(eqn: Any, lhs_ndim: int) -> tuple[int, ...]:
    """The permutation of the result of exchanged operands: lhs's axes go last."""
    (_, rhs_ca), (batch, _) = eqn.params["dimension_numbers"]
    start, end = len(batch), lhs_ndim - len(rhs_ca)
    ndim = len(eqn.outvars[0].aval.shape)
    return (*range(start), *range(end, ndim), *range(start, end))


def _exchanged(dims: Any) -> Any:
    (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = dims
    return (rhs_ca, lhs_ca), (rhs_ba, lhs_ba)


def _geometry(params: dict[str, Any]) -> tuple[Any, ...]:
    return (
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        params["dimension_numbers"],
        params["feature_group_count"],
        params["batch_group_count"],
    )


def equation_of(eqn: Any) -> str | None:
    """The axes of a `dot_general` as an einsum's equation; None for other primitives.

    >>> closed = jax.make_jaxpr(jnp.matmul)(jnp.ones((2, 3, 4)), jnp.ones((4, 5)))
    >>> equation_of(closed.eqns[0])
    'abc,cd->abd'
    """
    if eqn.primitive.name != "dot_general":
        return None
    (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = eqn.params["dimension_numbers"]
    letters = iter(string.ascii_lowercase + string.ascii_uppercase)
    lhs = [next(letters) for _ in eqn.invars[0].aval.shape]
    shared = dict(zip((*rhs_ca, *rhs_ba), (*lhs_ca, *lhs_ba), strict=True))
    rhs = [
        lhs[shared[axis]] if axis in shared else next(letters)
        for axis in range(len(eqn.invars[1].aval.shape))
    ]
    batch = [lhs[axis] for axis in lhs_ba]
    kept = [x for axis, x in enumerate(lhs) if axis not in (*lhs_ca, *lhs_ba)]
    kept += [x for axis, x in enumerate(rhs) if axis not in (*rhs_ca, *rhs_ba)]
    return f"{''.join(lhs)},{''.join(rhs)}->{''.join(batch + kept)}"


def smaller_size(eqn: Any) -> float:
    """How many elements the smaller operand of an equation has.

    One whose size is symbolic (`jax.export`) is taken for the larger one; infinity if
    both are.
    """
    sizes = [math.prod(atom.aval.shape) for atom in eqn.invars[:2]]
    return min((size for size in sizes if isinstance(size, int)), default=math.inf)
