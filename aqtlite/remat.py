"""Names of what a contraction quantizes, for policies of `jax.checkpoint`.

A quantized contraction gives names (`jax.ad_checkpoint.checkpoint_name`) to its
integers, their scales and their sums, so that a policy can save integers where it would
have saved floats of four times their size, and recompute the rest.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from aqtlite.operations import Side
from aqtlite.qtensor import QTensor

LHS, RHS = "aqt_lhs", "aqt_rhs"
"""The stored values of the operands."""

LHS_SCALE, RHS_SCALE = "aqt_lhs_scale", "aqt_rhs_scale"
"""Their scales and zero points."""

SUMS = "aqt_sums"
"""The sums of products, before they are scaled."""

OPERANDS = (LHS, RHS, LHS_SCALE, RHS_SCALE)

Policy = Callable[..., Any]


def save_quantized(*names: str) -> Policy:
    """A policy of `jax.checkpoint` that saves quantized operands and no floats.

    The backward pass quantizes nothing a second time that it reuses
    (``use_fwd_quant``), and of what it reuses keeps a quarter of float32's memory.
    Without `jax.checkpoint`, the floats between contractions are kept as well.

    >>> import jax.numpy as jnp
    >>> import aqtlite
    >>> from aqtlite import config, remat
    >>> dot = aqtlite.make_dot_general(config.fully_quantized())
    >>> def layer(w, x):
    ...     return jnp.tanh(dot(x, w, (((1,), (0,)), ((), ()))))
    >>> layer = jax.checkpoint(layer, policy=remat.save_quantized())
    >>> w, x = jnp.ones((4, 4)), jnp.ones((2, 4))
    >>> jax.grad(lambda w: layer(w, x).sum())(w).shape
    (4, 4)

    Args:
        *names: others to save, such as those of a model's own
            `jax.ad_checkpoint.checkpoint_name`.
    """
    policy: Policy = jax.checkpoint_policies.save_only_these_names(*OPERANDS, *names)
    return policy


def named(side: Side, q: QTensor) -> QTensor:
    """Gives names to the arrays of a quantized operand."""
    values, scale = (LHS, LHS_SCALE) if side == "lhs" else (RHS, RHS_SCALE)
    zero_point = q.zero_point
    if zero_point is not None:
        zero_point = checkpoint_name(zero_point, scale)
    return dataclasses.replace(
        q,
        qvalue=checkpoint_name(q.qvalue, values),
        scale=checkpoint_name(q.scale, scale),
        zero_point=zero_point,
    )
