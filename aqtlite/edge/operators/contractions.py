"""Matrix products and convolutions."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite.edge.arithmetic import contractions
from aqtlite.edge.arithmetic.kernels import Kernels
from aqtlite.edge.grid import Grid
from aqtlite.edge.operators import activation as activations
from aqtlite.edge.operators.activation import Activation
from aqtlite.edge.operators.base import Operator


@dataclasses.dataclass(frozen=True)
class FullyConnected(Operator):
    """``activation(x @ w + b)``: x of [..., K], w of [K, N], b of [N] or none."""

    activation: Activation = "none"

    name = "fully_connected"

    @property
    def channel_axis(self) -> int:
        """The axis of the weight that has a scale for each channel."""
        return 1

    def compute(self, *inputs: jax.Array) -> Any:
        x, w, *bias = inputs
        y = x @ w
        return activations.apply(y + bias[0] if bias else y, self.activation)

    def simulate(
        self,
        inputs: Sequence[Any],
        grids: Sequence[Any],
        output: Grid,
        kernels: Kernels,
    ) -> jax.Array:
        x, w, *bias = inputs
        return contractions.fully_connected(
            x,
            grids[0],
            w,
            grids[1],
            bias[0] if bias else None,
            output,
            activations.limits(self.activation),
            kernels,
        )


@dataclasses.dataclass(frozen=True)
class Conv2D(Operator):
    """A convolution: x of [N, H, W, C], w of [H, W, C / groups, N], b of [N] or none.

    Padding is "SAME" or "VALID": another one is an operator of its own.
    """

    strides: tuple[int, int]
    padding: str
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    activation: Activation = "none"

    name = "conv_2d"

    @property
    def channel_axis(self) -> int:
        """The axis of the weight that has a scale for each channel."""
        return 3

    def compute(self, *inputs: jax.Array) -> Any:
        x, w, *bias = inputs
        y = lax.conv_general_dilated(
            x,
            w,
            self.strides,
            self.padding,
            rhs_dilation=self.dilation,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=self.groups,
        )
        return activations.apply(y + bias[0] if bias else y, self.activation)

    def simulate(
        self,
        inputs: Sequence[Any],
        grids: Sequence[Any],
        output: Grid,
        kernels: Kernels,
    ) -> jax.Array:
        x, w, *bias = inputs
        return contractions.conv_2d(
            x,
            grids[0],
            w,
            grids[1],
            bias[0] if bias else None,
            output,
            self.strides,
            self.padding,
            self.dilation,
            self.groups,
            activations.limits(self.activation),
            kernels,
        )


@dataclasses.dataclass(frozen=True)
class DepthwiseConv2D(Conv2D):
    """A convolution of which every group has one channel of x."""

    name = "depthwise_conv_2d"


@dataclasses.dataclass(frozen=True)
class BatchMatMul(Operator):
    """``x @ y``: [..., M, K] by [..., K, N], both computed."""

    name = "batch_matmul"

    def compute(self, *inputs: jax.Array) -> Any:
        x, y = inputs
        return jnp.matmul(x, y)

    def simulate(
        self,
        inputs: Sequence[Any],
        grids: Sequence[Any],
        output: Grid,
        kernels: Kernels,
    ) -> jax.Array:
        (x, y), (x_grid, y_grid) = inputs, grids
        if x.ndim == 2:
            return contractions.matmul(x, x_grid, y, y_grid, output, kernels)
        return contractions.batch_matmul(x, x_grid, y, y_grid, output, kernels)


WEIGHTED = (FullyConnected, Conv2D)
"""Operators whose second input is a weight, and whose third, if any, is a bias."""
