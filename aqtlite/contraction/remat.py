"""Names of quantized operands and sums, for policies of `jax.checkpoint`.

A quantized contraction names (`jax.ad_checkpoint.checkpoint_name`) its integers, their
scales and their sums, so that a policy can save integers instead of floats of four
times their size, and recompute the rest.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from aqtlite.operations import Side
from aqtlite.qtensor.qtensor import QTensor

LHS, RHS = "aqt_lhs", "aqt_rhs"
"""The stored values of the operands."""

LHS_SCALE, RHS_SCALE = "aqt_lhs_scale", "aqt_rhs_scale"
"""The scales and zero points of the operands."""

SUMS = "aqt_sums"
"""The sums of products, before they are scaled."""

OPERANDS = (LHS, RHS, LHS_SCALE, RHS_SCALE)

Policy = Callable[..., Any]


def save_quantized(*names: str) -> Policy:
    """A policy of `jax.checkpoint` that saves quantized operands and no floats.

    The backward pass does not quantize again the operands that it reuses
    (``use_fwd_quant``), and they take a quarter of float32's memory. Without
    `jax.checkpoint`, the floats between contractions are kept as well.

    >>> import jax.numpy as jnp
    >>> import aqtlite
    >>> from aqtlite import config
    >>> from aqtlite.contraction import remat
    >>> dot = aqtlite.make_dot_general(config.fully_quantized())
    >>> def layer(w, x):
    ...     return jnp.tanh(dot(x, w, (((1,), (0,)), ((), ()))))
    >>> layer = jax.checkpoint(layer, policy=remat.save_quantized())
    >>> w, x = jnp.ones((4, 4)), jnp.ones((2, 4))
    >>> jax.grad(lambda w: layer(w, x).sum())(w).shape
    (4, 4)

    Args:
        *names: other names to save, such as a model's own
            `jax.ad_checkpoint.checkpoint_name`.
    """
    policy: Policy = jax.checkpoint_policies.save_only_these_names(*OPERANDS, *names)
    return policy


def named(side: Side, q: QTensor) -> QTensor:
    """Names the arrays of a quantized operand, for policies of `jax.checkpoint`."""
    name, scales = (LHS, LHS_SCALE) if side == "lhs" else (RHS, RHS_SCALE)
    zero_point = q.zero_point
    if zero_point is not None:
        zero_point = checkpoint_name(zero_point, scales)
    if jnp.issubdtype(q.qvalue.dtype, jnp.floating):
        qvalue = _unpack(
            jax.tree.map(lambda x: checkpoint_name(x, name), _pack(q.qvalue))
        )
    else:
        qvalue = checkpoint_name(q.qvalue, name)
    scale = checkpoint_name(q.scale, scales)
    return dataclasses.replace(q, qvalue=qvalue, scale=scale, zero_point=zero_point)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Packed:
    """Floats of 8 or 16 bits, bitcast to unsigned integers.

    `jax.checkpoint` passes every float that it saves through `lax.reduce_precision`,
    which reads the largest exponent as infinity or NaN and flushes subnormal values;
    that is wrong for some float8 dtypes.
    """

    bits: jax.Array
    dtype: np.dtype = dataclasses.field(metadata={"static": True})


def packed(tree: Any) -> Any:
    """Replaces stored floats by their bits, which `jax.checkpoint` saves exactly.

    Args:
        tree: a pytree with `QTensor`s as nodes.

    Returns:
        A pytree that `unpacked` takes; stored integers and float arrays are unchanged.
    """
    return _map_stored(_pack, tree)


def unpacked(tree: Any) -> Any:
    """Restores the stored floats that `packed` replaced."""
    return _map_stored(_unpack, tree)


def _map_stored(function: Callable[[Any], Any], tree: Any) -> Any:
    def of_node(node: Any) -> Any:
        if not isinstance(node, QTensor):
            return node
        return dataclasses.replace(node, qvalue=function(node.qvalue))

    return jax.tree.map(of_node, tree, is_leaf=lambda node: isinstance(node, QTensor))


def _pack(x: jax.Array) -> jax.Array | _Packed:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    bits = jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}")
    return _Packed(lax.bitcast_convert_type(x, bits), np.dtype(x.dtype))


def _unpack(x: jax.Array | _Packed) -> jax.Array:
    if not isinstance(x, _Packed):
        return x
    return lax.bitcast_convert_type(x.bits, x.dtype)
