"""`jax.lax.conv_general_dilated` as an operation."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite import lowering
from aqtlite.lowering import DotInput, Kind
from aqtlite.lowering.forms.convolution import Convolution
from aqtlite.operations.base import (
    SIDES,
    OperandAxes,
    Operation,
    Side,
    zero_points_leave_sums,
)
from aqtlite.operations.tiled import Tiled
from aqtlite.shapes import block_shapes
from aqtlite.shapes import dimension_numbers as dn
from aqtlite.shapes.dimension_numbers import Axes
from aqtlite.shapes.sharding import explicit_sharding, sharded_like

Array = Literal["x", "w", "y"]

_LETTERS: dict[Array, tuple[str, str]] = {
    "x": ("N", "C"),
    "w": ("O", "C"),
    "y": ("N", "O"),
}
"""The first two axes of each array's specification: examples (N), input features (C),
output features (O)."""

_ARRAYS: tuple[Array, ...] = ("x", "w", "y")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[],
    meta_fields=["forward", "shapes", "arrays"],
)
@dataclasses.dataclass(frozen=True)
class ConvGeneralDilated(Operation):
    """A `lax.conv_general_dilated`, or one of its gradients.

    A convolution sums ``x w`` into ``y`` wherever their positions satisfy
    ``a i + p = s j + d k`` along each spatial axis, with the dilation ``a`` and the
    padding ``p`` of ``x``, the stride ``s`` and the dilation ``d`` of ``w``. The
    condition is symmetric in the three arrays, so a gradient sums over the same
    positions into another array:

    - into ``x``, a convolution of ``y``, dilated by the strides, with ``w`` reversed in
      space and its feature axes exchanged;
    - into ``w``, a convolution of ``x`` with ``y``, dilated by the strides, with the
      examples as features.

    >>> conv = ConvGeneralDilated.of((2, 8, 8, 3), (3, 3, 3, 4), (2, 2), "SAME",
    ...                              dimension_numbers=("NHWC", "HWIO", "NHWC"))
    >>> conv.axes("lhs").contracting, conv.axes("lhs").cuttable
    ((1, 2, 3), (3,))
    >>> conv.gradient("rhs").axes("lhs").cuttable
    (0,)
    """

    forward: Convolution
    """The convolution that sums into ``y``."""

    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    """Shapes of ``x``, ``w`` and ``y``."""

    arrays: tuple[Array, Array, Array] = ("x", "w", "y")
    """The arrays that are lhs, rhs and the result."""

    @classmethod
    def of(
        cls, lhs_shape: Sequence[int], rhs_shape: Sequence[int], *args: Any, **kw: Any
    ) -> "ConvGeneralDilated":
        """Returns the convolution of operands of these shapes.

        Args:
            lhs_shape: shape of lhs.
            rhs_shape: shape of rhs.
            *args: arguments of `lax.conv_general_dilated`, from the strides on.
            **kw: keyword arguments of `lax.conv_general_dilated`.

        Raises:
            ValueError: if shapes and arguments do not fit.
            TypeError: if an argument has another type.
        """
        forward = Convolution.of(lhs_shape, rhs_shape, *args, **kw)
        y = forward.output_shape(lhs_shape, rhs_shape)
        return cls(forward, (tuple(lhs_shape), tuple(rhs_shape), y))

    @property
    def name(self) -> str:
        axes = "_".join("".join(map(str, self._spec(one))) for one in self.arrays)
        return f"conv_general_dilated_{axes}"

    def output_shape(
        self, lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...]
    ) -> tuple[int, ...]:
        del lhs_shape, rhs_shape
        return self._shape(self.arrays[2])

    def axes(self, side: Side) -> OperandAxes:
        array = self._array(side)
        contracting, batch, remaining = list(self._spec(array)[2:]), [], []
        window, groups = tuple(contracting), 1
        for axis, letter in self._axes_of_letters(array):
            if self._is_apart(array, letter):
                batch.append(axis)
            elif letter != self._summed:
                remaining.append(axis)
            else:
                contracting.append(axis)
                # A group has one element along the axis: there is nothing to cut.
                if any(self._is_apart(one, letter) for one in self.arrays[:2]):
                    window = *window, axis
                if letter == self._grouped(array):
                    groups = self._groups
        return OperandAxes(
            tuple(contracting), tuple(batch), tuple(remaining), window, groups
        )

    def sums_one(self, rhs_shape: tuple[int, ...]) -> bool:
        del rhs_shape
        # A window of one element, or of all of the other operand.
        arrays = ((self.axes(side), self._array(side)) for side in SIDES)
        return any(axes.has_one_element(self._shape(one)) for axes, one in arrays)

    @property
    def _summed(self) -> str:
        """The letter that is summed over besides the window: N, C or O."""
        (summed,) = set("NCO") - set(_LETTERS[self.arrays[2]])
        return summed

    def _axes_of_letters(self, array: Array) -> list[tuple[int, str]]:
        return list(zip(self._spec(array), _LETTERS[array], strict=False))

    def _is_apart(self, array: Array, letter: str) -> bool:
        """Whether each element along an axis is a group of its own."""
        if letter != self._grouped(array):
            return False
        axis = self._spec(array)[_LETTERS[array].index(letter)]
        return self._shape(array)[axis] == self._groups

    def ndim(self, side: Side) -> int:
        return len(self.forward.lhs_spec)

    def gradient(self, side: Side) -> "ConvGeneralDilated":
        lhs, rhs, out = self.arrays
        arrays = (out, rhs, lhs) if side == "lhs" else (out, lhs, rhs)
        return dataclasses.replace(self, arrays=arrays)

    def in_float(
        self,
        lhs: Any,
        rhs: Any,
        precision: Any,
        preferred_element_type: Any,
        out_sharding: Any,
    ) -> jax.Array:
        return self.forward(lhs, rhs, preferred_element_type, out_sharding, precision)

    def in_storage(self, side: Side, stored_axes: Axes) -> "ConvGeneralDilated":
        (x, w, y), forward = self.shapes, self.forward
        own, spec = (x, forward.lhs_spec) if side == "lhs" else (w, forward.rhs_spec)
        shape = tuple(own[stored_axes.index(axis)] for axis in range(len(own)))
        spec = tuple(stored_axes[axis] for axis in spec)
        if side == "lhs":
            forward = dataclasses.replace(forward, lhs_spec=spec)
            return dataclasses.replace(self, forward=forward, shapes=(shape, w, y))
        forward = dataclasses.replace(forward, rhs_spec=spec)
        return dataclasses.replace(self, forward=forward, shapes=(x, shape, y))

    def scale_to_output(self, side: Side, scale: jax.Array) -> jax.Array:
        return self._laid_out(self._array(side), self.arrays[2], scale)

    def rhs_scale_to_lhs(self, scale: jax.Array) -> jax.Array:
        return self._laid_out(self.arrays[1], self.arrays[0], scale)

    def rhs_scale_moves(self, scale_shape: tuple[int, ...]) -> bool:
        window = self._spec(self.arrays[1])[2:]
        fits = all(scale_shape[axis] == 1 for axis in window)
        return fits and super().rhs_scale_moves(scale_shape)

    def tiled(self, counts: tuple[int, ...]) -> Tiled:
        return Tiled(self.of_tiles(counts), *counts)

    def of_tiles(self, counts: tuple[int, ...]) -> "ConvGeneralDilated":
        (count,) = counts
        shapes = list(map(list, self.shapes))
        for array, shape in zip(_ARRAYS, shapes, strict=True):
            for axis, letter in self._axes_of_letters(array):
                if letter == self._summed:
                    shape[axis] //= count
        x, w, y = map(tuple, shapes)
        return dataclasses.replace(self, shapes=(x, w, y))

    def contract(self, kind, lhs, rhs, out_sharding=None):
        left, right = self._in_order(lhs, rhs)
        if self._zero_point_leaves_sums(kind, left, right):
            return self._less_zero_point(left, right, out_sharding)
        left, right = left.less_zero_point(), right.less_zero_point()
        right = right._replace(values=self._kernel(right.values))
        out = kind(lowering.Conv(self.convolution, out_sharding), left, right)
        groups = self.forward.batch_groups
        if self.arrays[2] != "x" or groups == 1:
            return out
        n, c, *_ = self.forward.lhs_spec
        return block_shapes.move_groups(out, c, n, groups)

    @functools.cached_property
    def convolution(self) -> Convolution:
        """The convolution that computes the result, from `_in_order` and `_kernel`."""
        match self.arrays[2]:
            case "x":
                return self.forward.for_dlhs(*self.shapes)
            case "w":
                return self.forward.for_drhs(*self.shapes)
        return self.forward

    def _in_order(self, lhs: DotInput, rhs: DotInput) -> tuple[DotInput, DotInput]:
        """The operands in the order of `convolution`: its kernel is the second one."""
        return (lhs, rhs) if self._side_of_first() == "lhs" else (rhs, lhs)

    def _side_of_first(self) -> Side:
        kernel = {"y": "w", "x": "w", "w": "y"}[self.arrays[2]]
        return "lhs" if self.arrays[1] == kernel else "rhs"

    def _kernel(self, values: jax.Array) -> jax.Array:
        """The kernel of `convolution`: reversed, with its features exchanged."""
        if self.arrays[2] != "x":
            return values
        o, c, *window = self.forward.rhs_spec
        return block_shapes.move_groups(lax.rev(values, window), o, c, self._groups)

    def _zero_point_leaves_sums(
        self, kind: Kind, left: DotInput, right: DotInput
    ) -> bool:
        """Whether the zero point of the first operand can be subtracted from the sums.

        It has to be constant along the contracting axes.
        """
        zero = left.zero_point
        contracting = self.axes(self._side_of_first()).contracting
        if zero is None or right.zero_point is not None:
            return False
        products = self.convolution.products(self._kernel(right.values).shape)
        return (
            zero_points_leave_sums(kind, left, right, products)
            and self.forward.batch_groups == 1
            and isinstance(products, int)
            and all(zero.shape[axis] == 1 for axis in contracting)
        )

    def _less_zero_point(self, left, right, out_sharding):
        """Computes ``sum (a - z) b`` as ``sum a b - z sum b``."""
        convolution, zero = self.convolution, left.zero_point
        kernel = self._kernel(right.values)
        # Intermediate values wrap modulo 2^32; the result fits int32.
        if self._counts_by_position(kernel):
            conv = lowering.Conv(convolution, out_sharding)
            sums = lowering.Integers()(conv, DotInput(left.values), DotInput(kernel))
            of_kernel = self._sums_at_elements(left.values.shape, kernel)
        else:
            conv = lowering.Conv(convolution.of_padded(), out_sharding)
            padded = DotInput(self._padded_with(left.values, zero))
            sums = lowering.Integers()(conv, padded, DotInput(kernel))
            of_kernel = self._sums_of_kernel(right.sums, kernel)
        zero, of_kernel = (
            sharded_like(x, explicit_sharding(sums))
            for x in (self.scale_to_output(self._side_of_first(), zero), of_kernel)
        )
        return sums.astype(jnp.int32) - zero * of_kernel

    def _padded_with(self, values: jax.Array, zero: jax.Array) -> jax.Array:
        """The first operand, padded with its zero point."""
        ones = [1] * values.ndim
        for axis in self.convolution.lhs_spec[2:]:
            ones[axis] = values.shape[axis]
        is_real = self.convolution.pad(jnp.ones(ones, bool), False)
        padded = self.convolution.pad(values, 0)
        return jnp.where(is_real, padded, zero.astype(padded.dtype))

    def _sums_of_kernel(self, known: jax.Array | None, kernel: jax.Array) -> jax.Array:
        """The sum of the kernel for each feature, laid out for the result."""
        if known is not None and self.arrays[2] == "y" and self._groups == 1:
            other: Side = "rhs" if self._side_of_first() == "lhs" else "lhs"
            return self.scale_to_output(other, known)
        features, *window = self.convolution.rhs_spec[1:]
        sums = kernel.astype(jnp.int32).sum((features, *window))
        shape = [1] * kernel.ndim
        shape[self.convolution.out_spec[1]] = sums.size
        return sums.reshape(shape)

    def _counts_by_position(self, kernel: jax.Array) -> bool:
        """Whether zeros between elements are left to XLA, which skips them.

        Stored as integers that are not zero, each of them would be multiplied. The sums
        have to be exact in float32.
        """
        is_dilated = any(step > 1 for step in self.convolution.lhs_dilation)
        return is_dilated and self.convolution.products(kernel.shape) * 128 <= 2**24

    def _sums_at_elements(self, shape: Sequence[int], kernel: jax.Array) -> jax.Array:
        """The sum of the part of the kernel that meets elements, by position."""
        spatial = self.convolution.lhs_spec[2:]
        ones = [n if axis in spatial else 1 for axis, n in enumerate(shape)]
        features = self.convolution.rhs_spec[1]
        sums = kernel.astype(jnp.float32).sum(features, keepdims=True)
        ungrouped = dataclasses.replace(self.convolution, feature_groups=1)
        found = ungrouped(
            jnp.ones(ones), sums, jnp.float32, precision=lax.Precision.HIGHEST
        )
        return found.astype(jnp.int32)

    @property
    def _groups(self) -> int:
        return max(self.forward.feature_groups, self.forward.batch_groups)

    def _array(self, side: Side) -> Array:
        return self.arrays[0 if side == "lhs" else 1]

    def _spec(self, array: Array) -> Axes:
        of = self.forward
        return (of.lhs_spec, of.rhs_spec, of.out_spec)[_ARRAYS.index(array)]

    def _shape(self, array: Array) -> tuple[int, ...]:
        return self.shapes[_ARRAYS.index(array)]

    def _grouped(self, array: Array) -> str | None:
        """The letter of the axis that is divided into groups; None without groups."""
        if self._groups == 1:
            return None
        if array != "x":
            return "O"
        return "C" if self.forward.feature_groups > 1 else "N"

    def _laid_out(self, source: Array, target: Array, scale: jax.Array) -> jax.Array:
        """Lays out a scale of one array to multiply another one.

        Args:
            source: array of the scale.
            target: array to multiply.
            scale: keepdims, of size 1 along axes that `target` lacks.
        """
        if self._groups == 1:
            given = {letter: axis for axis, letter in self._axes_of_letters(source)}
            axes = {
                axis: given[letter]
                for axis, letter in self._axes_of_letters(target)
                if letter in given
            }
            return dn.scale_along(scale, axes, scale.ndim)
        spec, grouped = self._spec(source), self._grouped(source)
        # The letters in the order of the axes of the scale.
        letters = [letter for _, letter in sorted(self._axes_of_letters(source))]
        x = scale.squeeze(spec[2:])
        if grouped is not None and x.shape[letters.index(grouped)] > 1:
            at = letters.index(grouped)
            x = block_shapes.split_axis(x, at, self._groups)
            letters.insert(at, "G")
        wanted: list[str] = []
        for letter in _LETTERS[target]:
            wanted += ["G", letter] if letter == self._grouped(target) else [letter]
        kept = [letter for letter in wanted if letter in letters]
        dropped = [i for i, letter in enumerate(letters) if letter not in wanted]
        x = x.squeeze(dropped)
        left = [letter for letter in letters if letter in wanted]
        x = x.transpose([left.index(letter) for letter in kept])
        new = [i for i, letter in enumerate(wanted) if letter not in kept]
        x = jnp.expand_dims(x, new)
        return self._merged(target, wanted, x)

    def _merged(self, target: Array, wanted: list[str], x: jax.Array) -> jax.Array:
        """Merges groups with the axis that they divide, and adds the spatial axes."""
        spec = self._spec(target)
        if "G" in wanted:
            at = wanted.index("G")
            if x.shape[at : at + 2] != (1, 1):
                axis = spec[_LETTERS[target].index(wanted[at + 1])]
                pair = self._groups, self._shape(target)[axis] // self._groups
                x = jnp.broadcast_to(x, (*x.shape[:at], *pair, *x.shape[at + 2 :]))
            x = block_shapes.merge_with_next(x, at)
        x = jnp.expand_dims(x, range(2, len(spec)))
        return x.transpose([spec.index(axis) for axis in range(len(spec))])
