"""The interface of a contraction."""

import abc
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from aqtlite.lowering import Contraction, DotInput, Integers, Kind
from aqtlite.shapes import dimension_numbers as dn
from aqtlite.shapes.dimension_numbers import Axes

Side = Literal["lhs", "rhs"]
SIDES: tuple[Side, Side] = ("lhs", "rhs")


class OperandAxes(NamedTuple):
    """The axes of one operand."""

    contracting: Axes
    """Summed over with those of the other operand."""

    batch: Axes
    """Paired with those of the other operand, and kept."""

    remaining: Axes
    """Kept; the other operand has none for them."""

    window: Axes = ()
    """Those of the contracting axes along which an element meets several of the other
    operand: they are never cut, and share a scale within a block."""

    groups: int = 1
    """Into how many groups, contracted apart, the axes that can be cut are divided."""

    @classmethod
    def of_contracting(cls, ndim: int, contracting: Axes) -> "OperandAxes":
        """The axes of an array, of which some are contracted.

        Args:
            ndim: its rank.
            contracting: those axes.
        """
        return cls(contracting, (), dn.remaining_axes(ndim, contracting, ()))

    @property
    def cuttable(self) -> Axes:
        """The contracting axes that can be cut into blocks."""
        return tuple(axis for axis in self.contracting if axis not in self.window)

    def counts_in_group(self, scale_shape: Sequence[int]) -> tuple[int, ...]:
        """Into how many tiles of equal scales each group is cut, along `cuttable`.

        >>> axes = OperandAxes((0, 1), (), (2,), window=(0,), groups=2)
        >>> axes.counts_in_group((1, 6, 5)), axes.counts_in_group((1, 1, 5))
        ((3,), (1,))

        Args:
            scale_shape: shape of the operand's scale.
        """
        return tuple(
            math.lcm(scale_shape[axis], self.groups) // self.groups
            for axis in self.cuttable
        )


class Operation(abc.ABC):
    """A bilinear contraction of two operands.

    It says how axes pair up, which operations its gradients are, where a scale goes,
    and how it is lowered; it knows nothing of configs. The quantization of *every*
    operation is written once, against this interface (`aqtlite.contraction`).

    Subclasses are frozen dataclasses and pytrees: what is static is a meta field, and
    an array that takes part without being an operand (the group sizes of a
    `ragged_dot`) is a data field.

    How other operations fit, with ``g`` the gradient of the output:

    - A convolution ``y[n,i,o] = sum_{k,c} x[n, s i + d k, c] w[k,c,o]`` contracts the
      window and the input features: ``x`` shares a scale along spatial axes and
      features, ``w`` along all axes but the output features. Only the features can be
      cut into tiles. The gradient of ``x`` is a
      convolution of ``g``, dilated by the strides, with ``w`` reversed in space and its
      feature axes exchanged; it contracts the window and the output features. The
      gradient of ``w`` is a convolution of ``x`` with ``g``, dilated by the strides,
      that contracts batch and output positions; its operands are exchanged when it is
      lowered, because ``g`` is the lhs of every gradient. Reversal, exchange and
      dilation move integers and leave them exact.
    - A `ragged_dot` ``y[m,n] = sum_k x[m,k] w[group(m),k,n]`` has ``group`` as a data
      field. A scale ``s[group,1,n]`` of ``w`` goes onto the output by a gather over
      rows. The gradient of ``x`` is a `ragged_dot` with ``w`` transposed; that of ``w``
      contracts the ragged rows, and its result has a group axis.
    """

    pairs_elements: ClassVar[bool] = False
    """Each element along a contracting axis meets one of the other operand alone, so
    that a scale along it may multiply either."""

    takes_precision: ClassVar[bool] = True
    """Contractions of floats have a precision to choose."""

    takes_sharding: ClassVar[bool] = True
    """It runs on meshes with explicit axes."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """A Python identifier of its kind and axes, the same for all sizes."""

    @abc.abstractmethod
    def output_shape(
        self, lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...]
    ) -> tuple[int, ...]:
        """The shape of the result."""

    @abc.abstractmethod
    def axes(self, side: Side) -> OperandAxes:
        """The axes of an operand; those of both that can be cut pair up in order."""

    @abc.abstractmethod
    def ndim(self, side: Side) -> int:
        """The rank of an operand."""

    @abc.abstractmethod
    def gradient(self, side: Side) -> "Operation":
        """The contraction that gives the gradient of an operand.

        Its lhs is the gradient of the output, its rhs the other operand, and its
        result has the operand's own order of axes.
        """

    def in_float(
        self,
        lhs: Any,
        rhs: Any,
        precision: Any,
        preferred_element_type: Any,
        out_sharding: Any,
    ) -> jax.Array:
        """Contracts arrays as `jax.lax` does, whose arguments these are.

        A gradient is not contracted so.
        """
        raise NotImplementedError(f"{type(self).__name__} is no function of jax.lax")

    def in_storage(self, side: Side, stored_axes: Axes) -> "Operation | None":
        """The contraction of an operand whose axes lie in another order.

        Args:
            side: the operand.
            stored_axes: for each of its axes, where that lies.

        Returns:
            A contraction with an equal result; None if there is none.
        """
        del side, stored_axes
        return None

    def masked(self, x: jax.Array) -> jax.Array:
        """Zeros where lhs, or the result, has rows that take no part."""
        return x

    @abc.abstractmethod
    def scale_to_output(self, side: Side, scale: jax.Array) -> jax.Array:
        """Lays a scale of an operand out so that it multiplies the output.

        Args:
            side: the operand.
            scale: keepdims, of size 1 along contracting axes.
        """

    @abc.abstractmethod
    def rhs_scale_to_lhs(self, scale: jax.Array) -> jax.Array:
        """Lays a scale of rhs out so that it multiplies lhs.

        Args:
            scale: keepdims, of size 1 along the remaining axes of rhs.
        """

    def lhs_scale_to_rhs(self, scale: jax.Array) -> jax.Array:
        """Lays a scale of lhs out so that it multiplies rhs, if it `pairs_elements`.

        Args:
            scale: keepdims, of size 1 along the remaining axes of lhs.
        """
        raise NotImplementedError(f"{type(self).__name__} does not move scales of lhs")

    def rhs_scale_moves(self, scale_shape: tuple[int, ...]) -> bool:
        """Returns True if a scale of rhs of this shape can multiply lhs instead."""
        kept = self.axes("rhs").remaining
        return all(scale_shape[axis] == 1 for axis in kept)

    def of_tiles(self, counts: tuple[int, ...]) -> "Operation":
        """The contractions of single tiles, their own arrays stacked, if any.

        Args:
            counts: for each pair of axes that can be cut, into how many tiles.

        Returns:
            An operation whose arrays have a new leading axis, an element for each tile.
        """
        del counts
        return self

    def tiled(self, counts: tuple[int, ...]) -> "Operation":
        """The contraction of tiles, of which each axis that is cut adds a batch axis.

        Args:
            counts: as `of_tiles` takes them.

        Returns:
            A contraction of what `block_shapes.cut` makes of the operands. Its
            result has as many axes more in front, over which it is to be summed.
        """
        raise NotImplementedError(f"{type(self).__name__} has no contraction of tiles")

    @abc.abstractmethod
    def contract(
        self,
        kind: Kind,
        lhs: DotInput,
        rhs: DotInput,
        out_sharding: NamedSharding | None = None,
    ) -> jax.Array:
        """Contracts values, less their zero points.

        Args:
            kind: of dot: what the values are, and in what they are summed.
            lhs: stored integers, or floats.
            rhs: stored integers, or floats.
            out_sharding: sharding of the result.
        """


class Lowered(Contraction, Operation):
    """An operation that kinds of dots take as it is."""

    def contract(self, kind, lhs, rhs, out_sharding=None):
        del out_sharding  # Part of an operation that has one.
        if lhs.zero_point is None and rhs.zero_point is None:
            return kind(self, lhs, rhs)
        products = self.products(lhs.values.shape, rhs.values.shape)
        if not zero_points_leave_sums(kind, lhs, rhs, products):
            return kind(self, lhs.less_zero_point(), rhs.less_zero_point())
        sums = kind(self, DotInput(lhs.values), DotInput(rhs.values))
        # All of it modulo 2^32: the result is within int32.
        return self.masked(sums.astype(jnp.int32) - _zero_point_terms(self, lhs, rhs))


def zero_points_leave_sums(
    kind: Kind, lhs: DotInput, rhs: DotInput, products: int
) -> bool:
    """Returns True if zero points may be taken off the sums of what is stored.

    Stored values are then of 8 bits, and int32 holds all sums.

    Args:
        kind: Kind of dot.
        lhs: Input to the dot.
        rhs: Input to the dot.
        products: Number of products in a sum; a symbolic one (jax.export) is taken to
            fit.
    """
    if not isinstance(kind, Integers):
        return False
    if lhs.zero_point is None and rhs.zero_point is None:
        return False
    is_wide = any(jnp.iinfo(one.values.dtype).bits > 8 for one in (lhs, rhs))
    bound = (lhs.largest or 0) * (rhs.largest or 0)
    is_long = isinstance(products, int) and products * bound >= 2**31
    return not (is_wide or is_long)


def _zero_point_terms(operation: Operation, lhs: DotInput, rhs: DotInput) -> jax.Array:
    """Computes ``sum a b - sum (a - za) (b - zb)``, modulo 2^32.

    That is ``sum (a - za) zb + za sum b``: sums over one operand each. Those of a
    frozen operand may be known. Zero points that vary along contracting axes are
    within the sums.

    Args:
        operation: a contraction that sums over its contracting axes alone.
        lhs: stored integers.
        rhs: the same. One of both has a zero point.
    """
    lhs_axes, rhs_axes = (operation.axes(side).contracting for side in ("lhs", "rhs"))
    found = []
    if rhs.zero_point is not None:
        a = lhs.values.astype(jnp.int32)
        if lhs.zero_point is not None:
            a = a - lhs.zero_point
        zb = rhs.zero_point
        if all(zb.shape[axis] == 1 for axis in rhs_axes):
            row = a.sum(lhs_axes, keepdims=True) if lhs.sums is None else lhs.sums
            row = operation.scale_to_output("lhs", row)
            found.append(row * operation.scale_to_output("rhs", zb))
        else:
            a = a * operation.rhs_scale_to_lhs(zb)
            row = a.sum(lhs_axes, keepdims=True)
            found.append(operation.scale_to_output("lhs", row))
    if lhs.zero_point is not None:
        za = lhs.zero_point
        if all(za.shape[axis] == 1 for axis in lhs_axes):
            column = operation.scale_to_output("rhs", _sums_of(rhs, rhs_axes))
            found.append(operation.scale_to_output("lhs", za) * column)
        else:
            b = rhs.values.astype(jnp.int32) * operation.lhs_scale_to_rhs(za)
            column = b.sum(rhs_axes, keepdims=True)
            found.append(operation.scale_to_output("rhs", column))
    return sum(found[1:], start=found[0])


def _sums_of(x: DotInput, axes: Axes) -> jax.Array:
    """The sums of stored integers over some axes, int32 and keepdims."""
    if x.sums is None:
        return x.values.astype(jnp.int32).sum(axes, keepdims=True)
    if x.zero_point is None:
        return x.sums
    count = math.prod(x.values.shape[axis] for axis in axes)
    return x.sums + count * x.zero_point
