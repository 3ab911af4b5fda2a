"""Layers whose weights are floats, or integers with scales.

Weights have the orientation of checkpoints, (outputs, inputs): a file's integers are
contracted as they are, along their last axis, which is also the fastest on CPUs.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import aqtlite
from aqtlite import config
from aqtlite.flax.nnx import Frozen
from aqtlite.llm.config import Norm
from aqtlite.qtensor import shape_operations
from aqtlite.qtensor.qtensor import QTensor


class Weight(nnx.Module):
    """A matrix that rows are contracted with, or looked up in."""

    def __init__(self, outputs: int, inputs: int, *, dtype: Any, rngs: nnx.Rngs):
        init = nnx.initializers.normal(inputs**-0.5)
        self.weight: nnx.Variable = nnx.Param(
            init(rngs.params(), (outputs, inputs), dtype)
        )
        self.cfg: config.DotGeneral | None = None

    def set_quantized(self, weight: QTensor, cfg: config.DotGeneral) -> None:
        """Replaces the weight by integers and scales.

        Args:
            weight: ``(outputs, inputs)``, quantized as ``cfg.fwd.rhs`` says.
            cfg: how rows are contracted with it.
        """
        self.weight = Frozen(weight)
        self.cfg = cfg

    def contract(self, x: jax.Array) -> jax.Array:
        """Contracts rows with the weight: ``(..., inputs)`` to ``(..., outputs)``."""
        weight = self.weight.get_value()
        equation = "...k,nk->...n"
        if isinstance(weight, QTensor):
            y: Any = aqtlite.einsum(equation, x, weight, cfg=self.cfg)
            return y
        return jnp.einsum(equation, x, weight)

    def rows(self, tokens: jax.Array) -> jax.Array:
        """Looks up rows: ``(...)`` to ``(..., inputs)``."""
        weight = self.weight.get_value()
        if not isinstance(weight, QTensor):
            return weight[tokens]
        found = shape_operations.take(weight, tokens.reshape(-1), 0, mode="clip")
        return found.dequant().reshape(*tokens.shape, -1)


class Linear(Weight):
    """A linear layer, with a bias or without."""

    def __init__(
        self, outputs: int, inputs: int, *, bias: bool, dtype: Any, rngs: nnx.Rngs
    ):
        super().__init__(outputs, inputs, dtype=dtype, rngs=rngs)
        zeros = nnx.Param(jnp.zeros(outputs, dtype)) if bias else None
        self.bias: nnx.Param | None = nnx.data(zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``(..., inputs)`` to ``(..., outputs)``."""
        y = self.contract(x)
        return y if self.bias is None else y + self.bias.get_value()


class Normalization(nnx.Module):
    """Normalization with its weights; see `normalized`."""

    def __init__(self, size: int, kind: Norm, eps: float, *, dtype: Any):
        fill = jnp.zeros if kind == "rms_plus_one" else jnp.ones
        self.weight = nnx.Param(fill(size, dtype))
        bias = nnx.Param(jnp.zeros(size, dtype)) if kind == "layer" else None
        self.bias: nnx.Param | None = nnx.data(bias)
        self.kind = kind
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes an array along its last axis."""
        bias = None if self.bias is None else self.bias.get_value()
        return normalized(x, self.weight.get_value(), bias, self.kind, self.eps)


def normalized(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, kind: Norm, eps: float
) -> jax.Array:
    """RMS or layer normalization of the last axis, in float32.

    Args:
        x: ``(..., size)``.
        weight: ``(size,)``.
        bias: ``(size,)``; None for none.
        kind: "layer" subtracts the mean; "rms_plus_one" scales by one plus the weight.
        eps: what is added to the mean of squares.
    """
    wide = x.astype(jnp.float32)
    if kind == "layer":
        wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)
    scale = weight.astype(jnp.float32)
    wide = wide * (1 + scale if kind == "rms_plus_one" else scale)
    if bias is not None:
        wide = wide + bias.astype(jnp.float32)
    return wide.astype(x.dtype)
