"""Matrix products and convolutions."""

import abc
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite.edge.arithmetic import contractions
from aqtlite.edge.arithmetic.kernels import Kernels
from aqtlite.edge.grid import Grid, Quantized
from aqtlite.edge.operators.base import Activated, Operator


class Weighted(Activated):
    """Base of operators of an activation, a weight, and an optional bias."""

    channel_axis: ClassVar[int]
    """Channel axis of the weight."""

    def before_activation(
        self, x: jax.Array, w: jax.Array, bias: jax.Array | None = None
    ) -> jax.Array:
        y = self.contract(x, w)
        return y if bias is None else y + bias

    @abc.abstractmethod
    def contract(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """Contracts x and w, without bias and activation."""


class FullyConnected(Weighted):
    """``activation(x @ w + b)``: x is [..., K], w is [K, N], b is [N] or absent."""

    name = "fully_connected"
    channel_axis = 1

    def contract(self, x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    def simulate(
        self,
        output: Grid,
        kernels: Kernels,
        x: Quantized,
        w: Quantized,
        bias: Quantized | None = None,
    ) -> jax.Array:
        return contractions.fully_connected(x, w, bias, output, self.clamp, kernels)


@dataclasses.dataclass(frozen=True)
class Conv2D(Weighted):
    """A convolution: x is [N, H, W, C], w is [H, W, C / groups, N], b is [N] or absent.

    Padding is "SAME" or "VALID"; other padding takes a `Pad` before the convolution.
    """

    strides: tuple[int, int]
    padding: str
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    name = "conv_2d"
    channel_axis = 3

    def contract(self, x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x,
            w,
            self.strides,
            self.padding,
            rhs_dilation=self.dilation,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=self.groups,
        )

    def simulate(
        self,
        output: Grid,
        kernels: Kernels,
        x: Quantized,
        w: Quantized,
        bias: Quantized | None = None,
    ) -> jax.Array:
        window = self.strides, self.padding, self.dilation, self.groups
        return contractions.conv_2d(x, w, bias, output, *window, self.clamp, kernels)


class DepthwiseConv2D(Conv2D):
    """A convolution with one channel of x per group."""

    name = "depthwise_conv_2d"


@dataclasses.dataclass(frozen=True)
class BatchMatMul(Operator):
    """``x @ y`` of two activations, [..., M, K] and [..., K, N]."""

    name = "batch_matmul"

    def compute(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.matmul(x, y)

    def simulate(
        self, output: Grid, kernels: Kernels, x: Quantized, y: Quantized
    ) -> jax.Array:
        is_one = x.qvalue.ndim == 2
        product = contractions.matmul if is_one else contractions.batch_matmul
        return product(x, y, output, kernels)
