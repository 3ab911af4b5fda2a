"""A quantized `lax.ragged_dot`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from aqtlite import config, operations
from aqtlite.contraction.contract import Options, as_operands, contract, with_config
from aqtlite.contraction.given_arguments import checks_arguments
from aqtlite.qtensor.qtensor import QTensor

RaggedDot = Callable[..., Any]


def make_ragged_dot(cfg: config.DotGeneral | None) -> RaggedDot:
    """Compiles a config into a function with the signature of `lax.ragged_dot`.

    ``y[m,n] = sum_k x[m,k] w[group(m),k,n]``, for a mixture of experts: rows, sorted by
    expert, are contracted with the matrix of their expert. By default each row of x has
    a scale, and so has each column of each expert in w.

    The gradient of w sums over the rows of each expert. There the gradient of the
    output has a scale for each column, found over the rows of all experts. A scale for
    each expert and column would need a segment maximum and gain little: the gradient of
    a row does not grow with the number of rows of its expert.

    The function is hashable, and the same object for equal configs.

    Args:
        cfg: what to quantize, and how: ``fwd.lhs`` are the rows, ``fwd.rhs`` the
            weights. None, or a config that quantizes nothing, gives a function that
            calls `lax.ragged_dot`.

    Returns:
        ``ragged_dot(lhs, rhs, group_sizes, precision=None,
        preferred_element_type=None, group_offset=None, out_sharding=None, *,
        key=None, states=None)``.

        - `lhs`, `rhs`: of shapes ``(m, k)`` and ``(g, k, n)``, otherwise as in the
          function that `make_dot_general` returns.
        - `group_sizes`: integers, of shape ``(g,)``. Rows after the last group have
          zero results and gradients, whatever they hold.
        - `precision`, `preferred_element_type`, `key`, `states`: as in that function.
        - `group_offset`, `out_sharding`: None. JAX has no `group_offset` either.

        It returns an array, or, where ``cfg.out`` quantizes the result, a `QTensor`.

    Raises:
        TypeError: if `cfg` is not a `config.DotGeneral` or None.

    >>> ragged_dot = make_ragged_dot(config.fully_quantized(fwd_bits=8, bwd_bits=8))
    >>> tokens, experts = jnp.ones((5, 4)), jnp.ones((3, 4, 2))
    >>> ragged_dot(tokens, experts, jnp.array([2, 0, 1]))[:, 0].round().tolist()
    [4.0, 4.0, 4.0, 0.0, 0.0]
    """
    return with_config(_ragged_dot, cfg)


@checks_arguments
def _ragged_dot(
    cfg: config.DotGeneral | None,
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
    lhs, rhs = as_operands(lhs, rhs)
    operation = ragged_operation(lhs, rhs, group_sizes, group_offset)
    options = Options(precision, preferred_element_type, out_sharding, key, states)
    return contract(cfg, operation, lhs, rhs, options)


def ragged_operation(
    lhs: Any, rhs: Any, group_sizes: Any, group_offset: Any = None
) -> operations.RaggedDot:
    """Returns the operation of a `lax.ragged_dot` of these operands.

    Raises:
        TypeError: if the group sizes are not integers.
        ValueError: if a shape does not fit, or if a group offset is given.
    """
    if group_offset is not None:
        raise ValueError(
            "group_offset was given, which a quantized ragged_dot does not have (nor "
            "has JAX a lowering for it); give the experts and sizes from there on"
        )
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
        sizes = sizes.astype(jnp.int32)  # An empty list becomes float32.
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
