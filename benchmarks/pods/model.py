"""Training step of a transformer as a scan over layers, without a framework."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness.contestants import Contestant


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a transformer; by default those of the pods."""

    layers: int = 8
    width: int = 2048
    hidden: int = 8192
    heads: int = 16
    length: int = 2048

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights of all layers."""
        shapes = {
            "qkv": (self.width, 3 * self.width),
            "out": (self.width, self.width),
            "up": (self.width, self.hidden),
            "down": (self.hidden, self.width),
        }
        return {name: (self.layers, *shape) for name, shape in shapes.items()}


Cut = Callable[[jax.Array, str], jax.Array]
"""Constrains the sharding of an activation, given where it stands."""


def layer(
    contestant: Contestant, sizes: Sizes, cut: Cut, x: jax.Array, w: Mapping[str, Any]
) -> jax.Array:
    """A pre-norm layer; weights are cast to the dtype of `x`, as Flax does."""

    def dot(x: jax.Array, name: str) -> jax.Array:
        weight = w[name].astype(x.dtype)
        out = contestant.dot_general(x, weight, (((x.ndim - 1,), (0,)), ((), ())))
        return out.astype(x.dtype)

    batch, length, _ = x.shape
    qkv = cut(dot(cut(_normalized(x), "residual"), "qkv"), "inner")
    heads = qkv.reshape(batch, length, sizes.heads, 3, -1)
    attended = jax.nn.dot_product_attention(
        *(heads[..., index, :] for index in range(3)), is_causal=True
    )
    attended = cut(attended.reshape(x.shape), "inner")
    x = x + cut(dot(attended, "out"), "residual")
    inner = cut(dot(cut(_normalized(x), "residual"), "up"), "inner")
    inner = cut(jax.nn.gelu(inner), "inner")
    return x + cut(dot(inner, "down"), "residual")


def _normalized(x: jax.Array) -> jax.Array:
    return jax.nn.standardize(x.astype(jnp.float32)).astype(x.dtype)


def training_step(
    contestant: Contestant,
    sizes: Sizes,
    checkpoint: Callable[..., Any],
    cut: Cut = lambda x, place: x,
) -> Callable[..., Any]:
    """One step of gradient descent, ``(weights, x, y) -> (weights, loss)``.

    Args:
        contestant: what contracts activations and weights.
        sizes: sizes of the model.
        checkpoint: a form of `jax.checkpoint`, applied to each layer.
        cut: constrains the sharding of activations.
    """

    @checkpoint
    def body(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return cut(layer(contestant, sizes, cut, x, w), "residual"), None

    def loss(weights: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        out, _ = jax.lax.scan(body, x, weights)
        return jnp.square((out - y).astype(jnp.float32)).mean()

    def step(weights: Any, x: jax.Array, y: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, x, y)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    return step
