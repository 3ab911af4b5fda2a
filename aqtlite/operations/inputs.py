"""Contractions as products of matrices.

An output of a contraction is a sum of products of a row of inputs with a column of
weights. Each group (a batch index, a feature group, an expert) has a matrix of its own.
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite.operations.base import Operation
from aqtlite.operations.conv_general_dilated import ConvGeneralDilated
from aqtlite.operations.dot_general import DotGeneral
from aqtlite.operations.ragged_dot import RaggedDot
from aqtlite.shapes.dimension_numbers import Axes


@dataclasses.dataclass(frozen=True)
class Matrices:
    """The layout of a rhs as matrices of shape ``(groups, inputs, outputs)``.

    >>> matmul = DotGeneral((((1,), (0,)), ((), ())), 2, 2)
    >>> Matrices.of(matmul, (3, 4)).shape
    (1, 3, 4)
    """

    split: tuple[int, ...]
    """Shape of the rhs, with an axis for the groups of a convolution."""

    order: Axes
    """Axes of `split`: those of groups, then inputs, then outputs."""

    counts: tuple[int, int]
    """Number of axes of groups, and of inputs."""

    rhs_shape: tuple[int, ...]

    @classmethod
    def of(cls, operation: Operation, rhs_shape: tuple[int, ...]) -> "Matrices":
        """Returns the layout of the rhs of a contraction.

        Args:
            operation: forward contraction.
            rhs_shape: shape of the rhs, which may be padded.

        Raises:
            ValueError: if the contraction has no such layout.
        """
        if isinstance(operation, ConvGeneralDilated):
            conv = _forward(operation)
            outputs, *inputs = conv.rhs_spec
            groups, sizes = conv.feature_groups, list(rhs_shape)
            sizes[outputs : outputs + 1] = groups, sizes[outputs] // groups
            inputs = [axis + (axis > outputs) for axis in inputs]
            order = (outputs, *inputs, outputs + 1)
            return cls(tuple(sizes), order, (1, len(inputs)), rhs_shape)
        if not isinstance(operation, DotGeneral | RaggedDot):
            raise ValueError(_unsupported(type(operation).__name__))
        axes = operation.axes("rhs")
        order = (*axes.batch, *axes.contracting, *axes.remaining)
        counts = len(axes.batch), len(axes.contracting)
        return cls(tuple(rhs_shape), order, counts, tuple(rhs_shape))

    @property
    def group_shape(self) -> tuple[int, ...]:
        """Sizes of the axes that make up the groups."""
        return tuple(self.split[axis] for axis in self.order[: self.counts[0]])

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Sizes of the axes that make up the inputs."""
        groups, inputs = self.counts
        return tuple(self.split[axis] for axis in self.order[groups : groups + inputs])

    @property
    def shape(self) -> tuple[int, int, int]:
        """Numbers of groups, inputs and outputs."""
        sizes = [self.split[axis] for axis in self.order]
        groups, inputs = self.counts
        cuts = (0, groups, groups + inputs, len(sizes))
        first, second, third = (
            math.prod(sizes[start:end]) for start, end in itertools.pairwise(cuts)
        )
        return first, second, third

    def place_of(self, axis: int) -> int:
        """Returns the place, in `input_shape`, of a contracting axis of the rhs."""
        if len(self.split) > len(self.rhs_shape):
            # Groups of a convolution stand before its outputs.
            axis += axis > self.order[0]
        return self.order.index(axis) - self.counts[0]

    def rows(self, rhs: jax.Array) -> jax.Array:
        """Returns a rhs as matrices."""
        return rhs.reshape(self.split).transpose(self.order).reshape(self.shape)

    def rhs(self, rows: jax.Array) -> jax.Array:
        """Returns matrices as a rhs: the inverse of `rows`."""
        sizes = [self.split[axis] for axis in self.order]
        inverse = [self.order.index(axis) for axis in range(len(self.order))]
        return rows.reshape(sizes).transpose(inverse).reshape(self.rhs_shape)


def second_moment(operation: Operation, lhs: jax.Array, rhs_shape: Axes) -> jax.Array:
    """Returns the sums of ``x_i x_j`` over the rows of inputs of a contraction.

    Args:
        operation: forward contraction.
        lhs: float32.
        rhs_shape: shape of the rhs, without padding.

    Returns:
        float32 of shape ``(groups, inputs, inputs)``, with the inputs in the order of
        `Matrices`.

    Raises:
        ValueError: as in `Matrices.of`.
    """
    groups, inputs, _ = Matrices.of(operation, rhs_shape).shape
    if isinstance(operation, RaggedDot):
        # The gradient of the weights of an output that equals the input.
        def outputs(weights: jax.Array) -> jax.Array:
            return lax.ragged_dot(
                lhs, weights, operation.group_sizes, precision="highest"
            )

        zeros = jnp.zeros((groups, inputs, inputs), jnp.float32)
        (found,) = jax.vjp(outputs, zeros)[1](lhs)
        return found
    if isinstance(operation, ConvGeneralDilated):
        return _of_rows(_rows_of_patches(_patches(operation, lhs), groups, inputs))
    axes = operation.axes("lhs")
    order = (*axes.batch, *axes.remaining, *axes.contracting)
    return _of_rows(lhs.transpose(order).reshape(groups, -1, inputs))


def masked_second_moment(
    operation: Operation, lhs: jax.Array, mask: jax.Array, rhs_shape: Axes
) -> jax.Array:
    """Returns the `second_moment` of the elements that count, others being zero.

    A patch of a convolution counts if all of its elements do.

    Args:
        operation: forward contraction.
        lhs: float32.
        mask: bool of the shape of lhs, True for elements that count.
        rhs_shape: shape of the rhs, without padding.
    """
    kept = jnp.where(mask, lhs, jnp.float32(0))
    if not isinstance(operation, ConvGeneralDilated):
        return second_moment(operation, kept, rhs_shape)
    groups, inputs, _ = Matrices.of(operation, rhs_shape).shape
    left_out = (_patches(operation, (~mask).astype(jnp.float32)) > 0).any(-1)
    patches = jnp.where(left_out[..., None], 0, _patches(operation, kept))
    return _of_rows(_rows_of_patches(patches, groups, inputs))


def _of_rows(rows: jax.Array) -> jax.Array:
    return jnp.einsum("gtk,gtl->gkl", rows, rows, precision="highest")


def _rows_of_patches(patches: jax.Array, groups: int, inputs: int) -> jax.Array:
    return patches.reshape(-1, groups, inputs).swapaxes(0, 1)


def _patches(operation: ConvGeneralDilated, lhs: jax.Array) -> jax.Array:
    """Returns the inputs of each position of the result, along the last axis."""
    conv = _forward(operation)
    window = [operation.shapes[1][axis] for axis in conv.rhs_spec[2:]]
    found = lax.conv_general_dilated_patches(
        lhs.transpose(conv.lhs_spec),
        window,
        conv.strides,
        conv.padding,
        conv.lhs_dilation,
        conv.rhs_dilation,
        precision=lax.Precision.HIGHEST,
    )
    return jnp.moveaxis(found, 1, -1)


def _forward(operation: ConvGeneralDilated):
    conv = operation.forward
    if conv.batch_groups > 1:
        raise ValueError(
            _unsupported(f"convolution with batch_group_count={conv.batch_groups}")
        )
    return conv


def _unsupported(what: str) -> str:
    return (
        f"fwd.rhs.rounding: the weights of a {what} are not rounded by GPTQ; set it to "
        "None for this contraction"
    )
