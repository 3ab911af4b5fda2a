"""The blocks of an operand that share a scale."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax

from aqtlite import config
from aqtlite.operations import OperandAxes
from aqtlite.shapes import block_shapes
from aqtlite.shapes import dimension_numbers as dn
from aqtlite.shapes.dimension_numbers import Axes


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class LocalBlocks(config.Blocks):
    """Blocks of `config.LocalAqt`: `count` blocks along the first contracting axis.

    A block spans the other contracting axes.
    """


class Layout(NamedTuple):
    """The layout of an operand's scales.

    Along axes in neither field, each element has its own scale.

    >>> Layout(shared=(0,), cut=((1, 4),)).scale_shape((3, 8, 5))
    (1, 4, 5)
    """

    shared: Axes
    """The axes along which all elements share a scale."""

    cut: tuple[tuple[int, int], ...] = ()
    """The axes that are cut into blocks, each with its number of blocks."""

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the scale, for an operand of this shape."""
        sizes = list(dn.shared_shape(shape, self.shared))
        for axis, count in self.cut:
            sizes[axis] = count
        return tuple(sizes)

    def in_blocks(self, x: jax.Array) -> tuple[jax.Array, Axes]:
        """Splits each cut axis into two: the number of blocks, and their size.

        Args:
            x: the operand.

        Returns:
            The operand, and the axes of it that now share a scale.
        """
        if not self.cut:
            return x, self.shared
        return block_shapes.split(
            x, self.scale_shape(x.shape)
        ), self._shared_in_blocks()

    def between_blocks(self, axes: Axes) -> Axes:
        """Returns axes of the operand as axes of the operand in blocks.

        Those of axes that are cut are the axes over blocks.
        """
        cut = {axis for axis, _ in self.cut}
        return tuple(axis + sum(other < axis for other in cut) for axis in axes)

    def _shared_in_blocks(self) -> Axes:
        inner = self.between_blocks(tuple(axis for axis, _ in self.cut))
        within = tuple(axis + 1 for axis in inner)
        return tuple(sorted((*self.between_blocks(self.shared), *within)))


def layout(
    tensor: config.Tensor,
    shape: Sequence[int],
    axes: OperandAxes,
    path: str,
) -> Layout:
    """Returns the layout of the scales of an operand.

    Args:
        tensor: config of the operand; by default the contracting axes share a scale.
        shape: shape of the operand.
        axes: axes of the operand.
        path: path of the config, for error messages.

    Raises:
        ValueError: if ``calib_shared_axes`` names an axis that the operand lacks or
            names one twice, or if blocks do not divide an axis.
    """
    if isinstance(tensor.blocks, LocalBlocks):
        return _local_blocks(tensor.blocks, shape, axes, path)
    if tensor.blocks is not None:
        return _blocks(tensor.blocks, shape, axes, path)
    return Layout(shared_axes(tensor, shape, axes, path))


def shared_axes(
    tensor: config.Tensor, shape: Sequence[int], axes: OperandAxes, path: str
) -> Axes:
    """Returns the axes along which the elements of an operand share a scale.

    Blocks are not considered.

    Raises:
        ValueError: if ``calib_shared_axes`` names an axis that the operand lacks or
            names one twice.
    """
    shared = tensor.calib_shared_axes
    if shared is None:
        return axes.contracting
    if shared == "remaining":
        return axes.remaining
    if shared == "per_tensor":
        return tuple(range(len(shape)))
    return normalize_axes(shared, shape, f"{path}.calib_shared_axes")


def _blocks(
    blocks: config.Blocks, shape: Sequence[int], axes: OperandAxes, path: str
) -> Layout:
    counts = dict.fromkeys(axes.window, 1)
    others = [axis for axis in range(len(shape)) if axis not in axes.contracting]
    if blocks.span_others:
        counts.update(dict.fromkeys(axes.cuttable[:-1], 1))
    try:
        for axis in axes.cuttable[-1:]:
            counts[axis] = axes.groups * blocks.count_of(_in_group(shape[axis], axes))
        if others and blocks.remaining_size > 1:
            counts[others[-1]] = blocks.remaining_count_of(shape[others[-1]])
    except ValueError as error:
        what_to_do = (
            "Blocks are padded for dot_general and einsum alone; choose another size"
            if blocks.pad
            else f"Choose another size, or set {path}.blocks.fit=True for the largest "
            f"blocks that divide it, or, for dot_general and einsum alone, "
            f"{path}.blocks.pad=True for a shorter last one"
        )
        raise ValueError(
            f"{path}.blocks.{error}; the operand has shape {tuple(shape)} and "
            f"{_contracting(axes)}. {what_to_do}"
        ) from error
    # An empty axis has no blocks.
    counts.update({axis: 1 for axis in axes.contracting if shape[axis] == 0})
    shared = tuple(axis for axis, count in counts.items() if count == 1)
    cut = {axis: n for axis, n in counts.items() if 1 < n < shape[axis]}
    return Layout(shared, tuple(cut.items()))


def _local_blocks(
    blocks: LocalBlocks, shape: Sequence[int], axes: OperandAxes, path: str
) -> Layout:
    where, count = path.rpartition(".")[0], blocks.count or 1
    if not axes.cuttable:
        raise ValueError(
            f"{where}.local_aqt splits a contracting axis, but this contraction has "
            f"none to split: {path} has shape {tuple(shape)}; leave local_aqt None"
        )
    first = axes.cuttable[0]
    if _in_group(shape[first], axes) % count:
        raise ValueError(
            f"{where}.local_aqt.contraction_axis_shard_count={count} does not divide "
            f"axis {first} of {path}, of shape {tuple(shape)} and with "
            f"{_contracting(axes)}"
        )
    if count == 1:
        return Layout(axes.contracting)
    rest = tuple(axis for axis in axes.contracting if axis != first)
    count *= axes.groups
    return Layout(rest, ((first, count),) if count < shape[first] else ())


def _in_group(size: int, axes: OperandAxes) -> int:
    """The size of an axis within one group."""
    return size if axes.groups == 1 else size // axes.groups


def _contracting(axes: OperandAxes) -> str:
    """Describes the contracting axes, for error messages."""
    found = f"the contracting axes {axes.contracting}"
    if axes.window:
        found += f", of which those of the window, {axes.window}, are never cut"
    if axes.groups > 1:
        found += f", and each of {axes.groups} groups is cut by itself"
    return found


def noise_axes(tensor: config.Tensor, shape: Sequence[int], path: str) -> Axes:
    """Returns the axes along which the elements of an operand share noise.

    Args:
        tensor: config of the operand.
        shape: shape of the operand.
        path: path of the config, for error messages.

    Raises:
        ValueError: if ``noise_shared_axes`` names an axis that the operand lacks or
            names one twice.
    """
    shared = tensor.noise_shared_axes or ()
    return normalize_axes(shared, shape, f"{path}.noise_shared_axes")


def normalize_axes(axes: Axes, shape: Sequence[int], what: str) -> Axes:
    """Returns axes counted from the front.

    Raises:
        ValueError: if an axis is out of range or named twice.
    """
    ndim = len(shape)
    if any(not -ndim <= axis < ndim for axis in axes):
        raise ValueError(
            f"{what}={axes} names an axis that an operand of shape {tuple(shape)} "
            "does not have"
        )
    normalized = tuple(axis % ndim for axis in axes)
    if len(set(normalized)) != len(normalized):
        raise ValueError(
            f"{what}={axes} names an axis of an operand of shape {tuple(shape)} twice"
        )
    return normalized
