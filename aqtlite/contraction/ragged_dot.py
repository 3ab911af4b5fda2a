"""A quantized `lax.ragged_dot`: the public function, and the checks of its call."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite import config, noise, operations
from aqtlite.contraction import checks, differentiation, execution, requantization
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.shapes import ragged_axes
from aqtlite.shapes.ragged_axes import RaggedAxes
from aqtlite.shapes.sharding import explicit_sharding

RaggedDot = Callable[..., Any]


def make_ragged_dot(cfg: config.DotGeneral | None) -> RaggedDot:
    """Compiles a config into a function with the signature of `lax.ragged_dot`.

    ``y[m,n] = sum_k x[m,k] w[group(m),k,n]``, for a mixture of experts: rows, sorted by
    expert, are contracted with the matrix of theirs. By default a row of x has a scale,
    and so has each column of each expert in w.

    The gradient of w sums over the rows of each expert. There the gradient of the
    output has a scale for each column, found over the rows of all experts. One for each
    expert and column would be a maximum by segments; the gradients of rows do not grow
    with the number of rows that an expert has, so that it would gain little.

    The function is hashable, and the same object for equal configs.

    Args:
        cfg: what to quantize, and how: ``fwd.lhs`` are the rows, ``fwd.rhs`` the
            weights. None, or a config that quantizes nothing, gives a function that
            calls `lax.ragged_dot`.

    Returns:
        ``ragged_dot(lhs, rhs, group_sizes, precision=None,
        preferred_element_type=None, group_offset=None, out_sharding=None, *,
        key=None, states=None)``.

        - `lhs`, `rhs`: of shapes ``(m, k)`` and ``(g, k, n)``, otherwise as those of
          `make_dot_general`'s function.
        - `group_sizes`: integers, of shape ``(g,)``. Rows behind the last group have
          zeros as result and as gradient, whatever they hold.
        - `precision`, `preferred_element_type`, `key`, `states`: as there.
        - `group_offset`, `out_sharding`: None. JAX has no `group_offset` either.

        It returns an array, or, where ``cfg.out`` quantizes the result, a `QTensor`.

    Raises:
        TypeError: if `cfg` is not a `config.DotGeneral` or None.

    >>> ragged_dot = make_ragged_dot(config.fully_quantized(fwd_bits=8, bwd_bits=8))
    >>> tokens, experts = jnp.ones((5, 4)), jnp.ones((3, 4, 2))
    >>> ragged_dot(tokens, experts, jnp.array([2, 0, 1]))[:, 0].round().tolist()
    [4.0, 4.0, 4.0, 0.0, 0.0]
    """
    checks.check_config(cfg, "make_ragged_dot")
    return _make(cfg)


@functools.cache
def _make(cfg: config.DotGeneral | None) -> RaggedDot:
    if cfg is None or not cfg.is_quantized:
        return _unquantized
    return functools.partial(_ragged_dot, cfg)


def _unquantized(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    out_sharding: Any = None,
    *,
    key: jax.Array | None = None,
    states: tuple[Any, ...] | None = None,
) -> jax.Array:
    """Calls `lax.ragged_dot`, and ignores what only quantization needs."""
    del key, states
    checks.check_arrays(lhs, rhs)
    sharding = {} if out_sharding is None else {"out_sharding": out_sharding}
    return lax.ragged_dot(
        lhs,
        rhs,
        group_sizes,
        precision,
        preferred_element_type,
        group_offset,
        **sharding,
    )


def _ragged_dot(
    cfg: config.DotGeneral,
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    out_sharding: Any = None,
    *,
    key: jax.Array | None = None,
    states: tuple[Any, ...] | None = None,
) -> jax.Array | QTensor:
    checks.check_precision(precision)
    lhs = checks.check_operand(lhs, cfg.fwd.lhs, "fwd.lhs")
    rhs = checks.check_operand(rhs, cfg.fwd.rhs, "fwd.rhs")
    checks.check_not_padded(lhs, "fwd.lhs")
    checks.check_not_padded(rhs, "fwd.rhs")
    _check_placement(lhs, rhs, group_offset, out_sharding)
    operation = ragged_operation(lhs, rhs, group_sizes)
    if cfg.fwd.smoothing is not None:
        raise ValueError(
            "fwd.smoothing was asked of a ragged_dot, but moves scales along the "
            "contracting axes of a dot_general or an einsum alone: set it to None"
        )
    given = checks.check_states(states)
    out_dtype = checks.check_out_dtype(preferred_element_type, lhs, rhs)
    lhs = lhs.in_own_order() if isinstance(lhs, QTensor) else lhs
    if isinstance(rhs, QTensor):
        rhs, operation = _as_stored(rhs, operation, cfg.fwd.rhs)
    lhs = zeros_behind_groups(operation, lhs)
    how = execution.resolve(cfg, operation, lhs, rhs, out_dtype)
    seed = None if key is None else noise.seed_from_key(key)
    inner = given._replace(out=())
    out = differentiation.quantize_and_contract(
        how, operation, lhs, rhs, seed, states=inner
    )
    # Its gradient may be anything there.
    out = zeros_behind_groups(operation, out)
    return requantization.quantize(out, cfg.out, given.out)


def ragged_operation(lhs: Any, rhs: Any, group_sizes: Any) -> operations.RaggedDot:
    """The operation of a `lax.ragged_dot` of such operands.

    Raises:
        TypeError: if the group sizes are no integers.
        ValueError: if a shape does not fit.
    """
    shapes = f"lhs of shape {lhs.shape} and rhs of shape {rhs.shape}"
    if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[1]:
        raise ValueError(
            "ragged_dot contracts lhs of shape (m, k) with rhs of shape (g, k, n), got "
            f"{shapes}"
        )
    if not hasattr(group_sizes, "shape") and not isinstance(group_sizes, list | tuple):
        raise TypeError(
            f"group_sizes must be integers, got {type(group_sizes).__name__}; they say "
            f"how many rows of lhs belong to each group, of {shapes}"
        )
    sizes = jnp.asarray(group_sizes)
    if not sizes.size:
        sizes = sizes.astype(jnp.int32)  # Of an empty list they are floats.
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise TypeError(
            f"group_sizes must be integers, got {sizes.dtype} of shape {sizes.shape}; "
            "they say how many rows of lhs belong to each group"
        )
    if sizes.shape != rhs.shape[:1]:
        raise ValueError(
            f"group_sizes must have a number for each group, of shape "
            f"{rhs.shape[:1]}, got shape {sizes.shape}, with {shapes}"
        )
    return operations.RaggedDot(sizes, lhs.shape[0])


def zeros_behind_groups(operation: operations.RaggedDot, x: Any) -> Any:
    """Clears the rows behind all groups, which are to have no part in a scale.

    Args:
        operation: has the sizes of the groups.
        x: the rows, or the result; a `QTensor` has its scales already, and stays.
    """
    if isinstance(x, QTensor):
        return x
    is_in_group = ragged_axes.are_in_groups(operation.group_sizes, operation.rows)
    return jnp.where(is_in_group[:, None], x, 0)


def _as_stored(
    q: QTensor, operation: operations.RaggedDot, tensor: config.Tensor
) -> tuple[QTensor, operations.RaggedDot]:
    """Contracts the axes of integers where they lie, behind that of the groups.

    A float contraction sums in an order that depends on where the axes lie.
    """
    is_exact = tensor.is_integer and not tensor.use_fake_quant
    if q.order is None or not is_exact or q.order[0] != 0:
        return q.in_own_order(), operation
    letters = "".join("gkn"[axis] for axis in q.order)
    axes = RaggedAxes("mk", letters, "mn")
    return q.as_stored(), dataclasses.replace(operation, axes_of=axes)


def _check_placement(lhs: Any, rhs: Any, group_offset: Any, out_sharding: Any) -> None:
    if group_offset is not None:
        raise ValueError(
            "group_offset was given, which a quantized ragged_dot does not have (nor "
            "has JAX a lowering for it); give the experts and sizes from there on"
        )
    floats = [x for x in (lhs, rhs) if not isinstance(x, QTensor)]
    if out_sharding is not None or any(explicit_sharding(x) for x in floats):
        raise ValueError(
            "a quantized ragged_dot runs on meshes with automatic axes, and inside "
            "jax.shard_map: it takes no out_sharding, and no operand with an explicit "
            "one. Make the mesh with axis_types=(AxisType.Auto, ...)"
        )
