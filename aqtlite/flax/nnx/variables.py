"""The types of the variables that quantized NNX models have."""

from typing import TypeVar

from flax import nnx

A = TypeVar("A")


class Frozen(nnx.Variable[A]):
    """A frozen weight of a serving model: a `QTensor` of integers and scales."""


class Statistics(nnx.Variable[A]):
    """The statistics of the operands of a contraction, for static ranges."""


class GradientStatistics(nnx.Variable[A]):
    """The statistics of the output gradient of a contraction.

    Their gradient is what takes their place: see `overwrite_with_gradient`.
    """
