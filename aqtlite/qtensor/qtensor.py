"""A quantized array: stored values, their scale, and the grid that decodes them."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import config, errors
from aqtlite.lowering import float8, transposed
from aqtlite.numerics import Numerics
from aqtlite.qtensor import indexing, stored_values
from aqtlite.qtensor.laid_out import LaidOut, PackedIntegers
from aqtlite.qtensor.no_arithmetic import NoArithmetic
from aqtlite.qtensor.transposed_values import TransposedValues
from aqtlite.shapes import block_shapes
from aqtlite.shapes.sharding import describe


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["qvalue", "scale", "zero_point", "unrounded", "sums", "offset"],
    meta_fields=["dtype", "order", "numerics", "padding", "rotation"],
)
@dataclasses.dataclass(frozen=True)
class QTensor(NoArithmetic):
    """A quantized array: stored values, their scale and their grid.

    A pytree with the leaves `qvalue`, `scale` and, if the grid has one, `zero_point`;
    it works with `jax.jit`, `jax.lax.scan`, `jax.device_put`, `jax.tree.map` and
    checkpoints.

    It can be indexed, transposed and reshaped like an array, and stays quantized;
    `aqtlite.shape_operations` has further functions of NumPy. It has no arithmetic.

    >>> import aqtlite, jax.numpy as jnp
    >>> from aqtlite import config, numerics
    >>> int8 = config.Tensor(numerics=numerics.IntSymmetric(bits=8))
    >>> q = aqtlite.quantize(jnp.array([[1.0, -2.0], [0.5, 0.25]]), int8, (1,))
    >>> q.qvalue.tolist(), q.scale.shape, q.dtype
    ([[64, -127], [127, 64]], (2, 1), dtype('float32'))
    >>> q[1].dequant().round(2).tolist()
    [0.5, 0.25]
    """

    qvalue: Any
    """Stored values, in the storage dtype of the grid; frozen ones of nf4 and fp4 as
    int4 codes; `PackedValues` if they are laid out for a platform
    (``convert(..., packed="cpu")``)."""

    scale: Any
    """Scales, float32, of the rank of `qvalue`. The size along an axis is the number of
    scales, 1 if the whole axis shares one; it divides the size of `qvalue`."""

    dtype: np.dtype
    """Dtype that `dequant` returns."""

    order: tuple[int, ...] | None = None
    """Axes of the array, in the order in which `qvalue` and `scale` store them (their
    trailing axes). None: stored in their own order. Frozen weights are stored with
    their contracting axes last."""

    zero_point: Any = None
    """Stored value that represents zero, int32, of the shape of `scale`. None: 0."""

    numerics: Numerics | None = None
    """The grid. None: integers, decoded as their own values."""

    unrounded: Any = None
    """The float array that was rounded, stored like `qvalue`; it takes the gradient of
    `dequant` and of contractions (straight-through estimator). Its values are not used.
    None: the gradient is zero, or refused."""

    sums: Any = None
    """Sums of the stored values less their zero point over the contracting axes, int32,
    keepdims, stored like `qvalue`; contractions with an operand with a zero point need
    them. Frozen weights carry them to save the sums in serving. None: computed where
    needed."""

    padding: tuple[int, ...] | None = None
    """Number of zeros appended to `qvalue` along each (trailing) axis of the array, so
    that blocks divide it (``config.Blocks(pad=True)``). None: no zeros."""

    rotation: config.Hadamard | None = None
    """The rotation of the array before it was quantized, which `dequant` does not undo
    (``fwd.rotation`` of a config); of frozen weights, set where they are served."""

    offset: Any = None
    """Float added to the scaled values, float32, of the shape of `scale`, as GGUF files
    have it (`aqtlite.checkpoint.load_quantized`). None: 0. A contraction takes the
    result of `dequant` instead."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array, in its own order of axes and without padding."""
        sizes = tuple(self.qvalue.shape[axis] for axis in self.stored_axes)
        padding = self.padding or ()
        widths = (0,) * (len(sizes) - len(padding)) + padding
        return tuple(map(operator.sub, sizes, widths))

    @property
    def ndim(self) -> int:
        """The rank of the array."""
        return self.qvalue.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def stored_axes(self) -> tuple[int, ...]:
        """The axis of `qvalue` for each axis of the array."""
        if self.order is None:
            return tuple(range(self.ndim))
        # A scan or a vmap stacked the leading axes that `order` does not have.
        stacked = self.ndim - len(self.order)
        inverse = (stacked + int(axis) for axis in np.argsort(self.order))
        return (*range(stacked), *inverse)

    @property
    def blocks(self) -> tuple[int, ...]:
        """The number of elements that share a scale, along each axis of the array."""
        shapes = (
            [x.shape[axis] for axis in self.stored_axes]
            for x in (self.qvalue, self.scale)
        )
        return block_shapes.block_sizes(*shapes)

    def stored_in(self, order: tuple[int, ...]) -> "QTensor":
        """Stores the axes in another order.

        Args:
            order: a permutation of the axes.
        """
        is_own = order == tuple(range(self.ndim))
        return self.in_own_order()._transposed(order, None if is_own else order)

    def in_own_order(self) -> "QTensor":
        """Stores the axes in their own order, unpacked."""
        if self.order is None:
            return self.unpacked()
        return self._transposed(self.stored_axes, None)

    def unpacked(self) -> "QTensor":
        """Stores values that were laid out for a platform as an array."""
        if not isinstance(self.qvalue, LaidOut):
            return self
        return dataclasses.replace(self, qvalue=self.qvalue.unpacked())

    def on_grid(self) -> "QTensor":
        """Restores the stored values of the grid from codes (`stored_values`)."""
        values = stored_values.on_grid(self.qvalue, self.numerics)
        return dataclasses.replace(self, qvalue=values)

    def with_values_as_stored(self) -> "QTensor":
        """Stores scales in their own order of axes, and leaves values as they are.

        Raises:
            ValueError: if there is more than values of a grid and their scales.
        """
        axes, grid = self.stored_axes, self.numerics
        others = self.padding, self.zero_point, self.sums, self.offset
        if grid is None or any(one is not None for one in others):
            raise ValueError(f"{self!r} has more than values of a grid, and scales")
        fields: dict[str, Any] = {"scale": transposed(self.scale, axes)}
        if self.unrounded is not None:
            fields["unrounded"] = transposed(self.unrounded, axes)
        values = TransposedValues(self.qvalue, axes, grid)
        return dataclasses.replace(self, qvalue=values, order=None, **fields)

    def as_stored(self) -> "QTensor":
        """Returns the array with its axes in the order of storage."""
        if self.order is None:
            return self
        padding = self.padding and tuple(self.padding[axis] for axis in self.order)
        return dataclasses.replace(self, order=None, padding=padding)

    def _transposed(
        self, axes: tuple[int, ...], order: tuple[int, ...] | None
    ) -> "QTensor":
        names = ("qvalue", "scale", "zero_point", "offset", "unrounded", "sums")
        whole = self.unpacked()
        arrays = {name: getattr(whole, name) for name in names}
        moved: dict[str, Any] = {
            name: None if array is None else transposed(array, axes)
            for name, array in arrays.items()
        }
        return dataclasses.replace(self, order=order, **moved)

    def stop_gradient(self) -> "QTensor":
        """Drops `unrounded`: the result is a constant to differentiation."""
        return dataclasses.replace(self, unrounded=None)

    def astype(self, dtype: Any) -> "QTensor":
        """Changes the dtype that `dequant` returns, but not the stored values.

        Raises:
            TypeError: if `dtype` is not floating.
        """
        dtype = jnp.dtype(dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"a QTensor stands for floats, and {dtype.name} is no float dtype; "
                "convert the result of .dequant(), or take .qvalue"
            )
        x = self.unrounded
        unrounded = None if x is None else x.astype(dtype)
        return dataclasses.replace(self, dtype=dtype, unrounded=unrounded)

    def dequant(self) -> jax.Array:
        """Returns the array that the stored values represent, in `dtype`.

        This is ``scale * decode(qvalue - zero_point) + offset``, computed in float32.
        """
        plain = self.in_own_order().on_grid()
        grid, axes, stored = plain.numerics, range(plain.ndim), plain.qvalue
        if plain.zero_point is not None:
            zero_point = block_shapes.repeat(plain.zero_point, stored.shape, axes)
            stored = stored.astype(jnp.int32) - zero_point
        if grid is not None and grid.arithmetic == "table":
            values = grid.decode(stored)
            if values.dtype != jnp.float32 or values.shape != stored.shape:
                raise TypeError(
                    f"{type(grid).__name__}.decode must return float32 of shape "
                    f"{stored.shape}, got {values.dtype} of shape {values.shape}"
                )
        else:
            values = float8.widened(stored)
        scale = block_shapes.repeat(plain.scale, stored.shape, axes)
        out = values * scale
        if plain.offset is not None:
            # The product is exact in files that have offsets: 11 bits of a float16, 6
            # of a scale and 5 of a code. So it does not matter whether XLA rounds it.
            out += block_shapes.repeat(plain.offset, stored.shape, axes)
        out = out.astype(self.dtype)
        if self.unrounded is not None:
            out = straight_through(out, plain.unrounded)
        return out if self.padding is None else out[tuple(map(slice, self.shape))]

    def reshape(self, *shape: Any) -> "QTensor":
        """Reshapes like an array, if elements that share a scale stay adjacent.

        Axes that share a scale can be split and merged, and so can axes with a scale
        for each element. Merging an axis with a scale for each element with a following
        axis that shares a scale gives blocks.

        >>> import aqtlite, jax.numpy as jnp
        >>> from aqtlite import config, numerics
        >>> int8 = config.Tensor(numerics=numerics.IntSymmetric(bits=8))
        >>> q = aqtlite.quantize(jnp.ones((2, 3, 4)), int8, axes=2)
        >>> q.reshape(6, 4).scale.shape, q.reshape(2, -1).scale.shape
        ((6, 1), (2, 3))

        Raises:
            ValueError: if the sizes do not fit, or elements that share a scale would
                no longer be adjacent.
        """
        _check_not_padded(self)
        sizes = shape[0] if len(shape) == 1 and np.ndim(shape[0]) else shape
        q = self.in_own_order()
        new = block_shapes.without_minus_one(q.shape, sizes)
        new_scale = block_shapes.reshaped_scale(q.shape, q.scale.shape, new)
        return rearrange(q, lambda x: x.reshape(new), lambda x: x.reshape(new_scale))

    def transpose(self, *axes: Any) -> "QTensor":
        """Permutes the axes.

        Args:
            *axes: permutation of the axes, as ints or as one sequence; by default, the
                axes are reversed.

        Raises:
            ValueError: if `axes` is not a permutation.
        """
        given = axes[0] if len(axes) == 1 and np.ndim(axes[0]) else axes
        order = tuple(given) if given else tuple(reversed(range(self.ndim)))
        if sorted(a + self.ndim * (a < 0) for a in order) != list(range(self.ndim)):
            raise ValueError(f"{order} is no permutation of the {self.ndim} axes")
        return rearrange_alike(self, lambda x: x.transpose(order))

    @property
    def T(self) -> "QTensor":
        """The array with its axes reversed."""
        return self.transpose()

    @property
    def mT(self) -> "QTensor":
        """The array with its last two axes exchanged."""
        return self.swapaxes(-1, -2)

    def swapaxes(self, axis1: int, axis2: int) -> "QTensor":
        """Exchanges two axes."""
        return rearrange_alike(self, lambda x: x.swapaxes(axis1, axis2))

    def squeeze(self, axis: int | Sequence[int] | None = None) -> "QTensor":
        """Removes axes of size 1.

        Args:
            axis: one axis, or several. None: all axes of size 1.

        Raises:
            ValueError: if an axis is out of range, or not of size 1.
        """
        if axis is None:
            axes = tuple(i for i, size in enumerate(self.shape) if size == 1)
        else:
            named = axis if isinstance(axis, Sequence) else (axis,)
            axes = tuple(block_shapes.from_the_front(i, self.ndim) for i in named)
        for one in axes:
            if self.shape[one] != 1:
                raise ValueError(
                    f"axis {one} of a QTensor of shape {self.shape} is not of size 1"
                )
        return rearrange_alike(self, lambda x: x.squeeze(axes))

    def __repr__(self) -> str:
        """Shows dtypes and shapes instead of numbers, of which there may be many."""
        parts = [describe(self.qvalue), f"scale={describe(self.scale)}"]
        if isinstance(self.qvalue, PackedIntegers):
            parts.append("packed")
        if self.zero_point is not None:
            parts.append(f"zero_point={describe(self.zero_point)}")
        if self.offset is not None:
            parts.append(f"offset={describe(self.offset)}")
        if self.sums is not None:
            parts.append(f"sums={describe(self.sums)}")
        if self.numerics is not None:
            parts.append(f"numerics={self.numerics!r}")
        if self.order is not None:
            parts.append(f"order={self.order}")
        if self.padding is not None:
            parts.append(f"padding={self.padding}")
        return f"QTensor({', '.join(parts)}, dtype={np.dtype(self.dtype).name!r})"

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("a QTensor without axes has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator["QTensor"]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> "QTensor":
        """Indexes with ints, slices, None and Ellipsis.

        Raises:
            TypeError: for arrays and lists of indices, and along an axis of several
                blocks; `dequant` first.
            IndexError: for more indices than axes, or a Python int out of range.
        """
        if self.order is not None:
            return self.in_own_order()[index]
        _check_not_padded(self)
        values, scales = indexing.entries(index, self.shape, self.scale.shape)
        return rearrange(self, lambda x: x[values], lambda x: x[scales])

    def arithmetic_error(self) -> errors.NoArithmeticError:
        return errors.NoArithmeticError(
            f"a QTensor of shape {self.shape} has no arithmetic: it is contracted, or "
            "moved as it is. Compute with the result of .dequant(). A layer that adds "
            "a bias to a quantized result needs use_bias=False; a model whose "
            "parameters are quantized already is converted first (aqtlite.flax.convert,"
            " aqtlite.flax.nnx.convert, aqtlite.convert_function)"
        )


def rearrange(
    q: QTensor, on_values: Callable[[Any], Any], on_scales: Callable[[Any], Any]
) -> QTensor:
    """Moves elements and their scales.

    Args:
        q: a `QTensor` in any order of storage; the result is in its own order.
        on_values: function of the stored values, and of `unrounded`.
        on_scales: function of the scale, the zero point and the offset.
    """
    _check_not_padded(q)
    q = q.in_own_order()
    return dataclasses.replace(
        q,
        qvalue=on_values(q.qvalue),
        scale=on_scales(q.scale),
        zero_point=None if q.zero_point is None else on_scales(q.zero_point),
        offset=None if q.offset is None else on_scales(q.offset),
        unrounded=None if q.unrounded is None else on_values(q.unrounded),
        sums=None,
    )


def _check_not_padded(q: QTensor) -> None:
    if q.padding is not None:
        raise TypeError(
            f"a QTensor of shape {q.shape} whose blocks are padded by {q.padding} is "
            "contracted as it is, and not indexed or rearranged; use the result of "
            ".dequant()"
        )


def rearrange_alike(q: QTensor, function: Callable[[Any], Any]) -> QTensor:
    """Moves elements and their scales by one function, which keeps blocks intact."""
    return rearrange(q, function, function)


@jax.custom_jvp
def straight_through(value: jax.Array, x: jax.Array) -> jax.Array:
    """Returns `value`, with the gradient of `x`, an array of its shape and dtype."""
    del x
    return value


@straight_through.defjvp
def _straight_through_jvp(primals: Any, tangents: Any) -> Any:
    return straight_through(*primals), tangents[1]


Operand = jax.Array | QTensor
"""An operand of a contraction."""


def dequantized(x: Any) -> Any:
    """Returns a quantized array in float, and anything else as it is."""
    return x.dequant() if isinstance(x, QTensor) else x
