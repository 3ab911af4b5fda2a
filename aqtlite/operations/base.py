"""The interface of a contraction.

Before: `contraction/dot_general.py`, which makes an operation.
Next: `contraction/contract.py`, which contracts by it.
"""

import abc
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from aqtlite.lowering import Contraction, DotInput, Integers, Kind
from aqtlite.shapes import dimension_numbers as dn
from aqtlite.shapes.dimension_numbers import Axes, Side
from aqtlite.shapes.sharding import explicit_sharding, sharded_like

SIDES: tuple[Side, Side] = ("lhs", "rhs")


class OperandAxes(NamedTuple):
    """The axes of one operand."""

    contracting: Axes
    """Axes that are summed over, together with axes of the other operand."""

    batch: Axes
    """Axes of the result that both operands have."""

    remaining: Axes
    """Axes of the result that the other operand lacks."""

    window: Axes = ()
    """Contracting axes along which an element meets several elements of the other
    operand: they are never cut, and share a scale within a block."""

    groups: int = 1
    """Number of groups, contracted separately, into which cuttable axes are divided."""

    @classmethod
    def of_contracting(cls, ndim: int, contracting: Axes) -> "OperandAxes":
        """Returns the axes of an array with contracting and remaining axes only.

        Args:
            ndim: rank of the array.
            contracting: contracting axes.
        """
        return cls(contracting, (), dn.remaining_axes(ndim, contracting, ()))

    @property
    def cuttable(self) -> Axes:
        """The contracting axes that can be cut into blocks."""
        return tuple(axis for axis in self.contracting if axis not in self.window)

    def has_one_element(self, shape: tuple[int, ...]) -> bool:
        """Whether there are contracting axes, and one element along all of them.

        Args:
            shape: shape of the operand.
        """
        size = math.prod(shape[axis] for axis in self.contracting)
        return bool(self.contracting) and size == self.groups

    def counts_in_group(self, scale_shape: Sequence[int]) -> tuple[int, ...]:
        """The number of tiles with constant scales in a group, for each cuttable axis.

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

    It defines how axes pair up, the operations of its gradients, the layout of scales
    and the lowering, and does not depend on configs. The quantization of *every*
    operation is written once, against this interface (`aqtlite.contraction`).

    Subclasses are frozen dataclasses and pytrees: static fields are meta fields, and
    arrays other than the operands (the group sizes of a `ragged_dot`) are data fields.

    Other operations fit the interface as follows, with ``g`` the gradient of the
    output:

    - A convolution ``y[n,i,o] = sum_{k,c} x[n, s i + d k, c] w[k,c,o]`` contracts the
      window and the input features: ``x`` shares a scale along spatial axes and
      features, ``w`` along all axes but the output features. Only the features can be
      cut into tiles. The gradient of ``x`` is a convolution of ``g``, dilated by the
      strides, with ``w`` reversed in space and its feature axes exchanged; it contracts
      the window and the output features. The gradient of ``w`` is a convolution of
      ``x`` with ``g``, dilated by the strides, and contracts batch and output
      positions; lowering exchanges its operands, because ``g`` is the lhs of every
      gradient. Reversal, exchange and dilation only move integers.
    - A `ragged_dot` ``y[m,n] = sum_k x[m,k] w[group(m),k,n]`` has ``group`` as a data
      field. A scale ``s[group,1,n]`` of ``w`` is gathered over rows to multiply the
      output. The gradient of ``x`` is a `ragged_dot` with ``w`` transposed; the
      gradient of ``w`` contracts the ragged rows, and its result has a group axis.
    """

    pairs_elements: ClassVar[bool] = False
    """Whether each element along a contracting axis meets a single element of the other
    operand, so that a scale along the axis may multiply either operand."""

    takes_precision: ClassVar[bool] = True
    """Whether contractions of floats take a precision."""

    takes_sharding: ClassVar[bool] = True
    """Whether the operation runs on meshes with explicit axes."""

    @property
    def sums_in_groups(self) -> bool:
        """Whether parts of a contracting axis, known at run time, are summed apart."""
        return False

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """A Python identifier from the operation's kind and axes, but not its sizes."""

    @abc.abstractmethod
    def output_shape(
        self, lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...]
    ) -> tuple[int, ...]:
        """The shape of the result."""

    @abc.abstractmethod
    def axes(self, side: Side) -> OperandAxes:
        """The axes of an operand; the cuttable axes of both operands pair in order."""

    @abc.abstractmethod
    def ndim(self, side: Side) -> int:
        """The rank of an operand."""

    @property
    def sums_nothing(self) -> bool:
        """Whether no axis is contracted: each element of the result is one product."""
        return not self.axes("lhs").contracting

    def sums_one(self, rhs_shape: tuple[int, ...]) -> bool:
        """Whether axes are contracted, and each sum has one product all the same.

        >>> from aqtlite.operations import DotGeneral
        >>> matmul = DotGeneral((((1,), (0,)), ((), ())), 2, 2)
        >>> matmul.sums_one((1, 4)), matmul.sums_one((2, 4))
        (True, False)

        Args:
            rhs_shape: shape of rhs. A symbolic size (`jax.export`) is not one.
        """
        return self.axes("rhs").has_one_element(rhs_shape)

    @abc.abstractmethod
    def gradient(self, side: Side) -> "Operation":
        """The contraction that gives the gradient of an operand.

        Its lhs is the gradient of the output, its rhs the other operand; the axes of
        its result are in the operand's order.
        """

    def in_float(
        self,
        lhs: Any,
        rhs: Any,
        precision: Any,
        preferred_element_type: Any,
        out_sharding: Any,
    ) -> jax.Array:
        """Contracts float arrays by the function of `jax.lax` with these arguments.

        Not for gradients.
        """
        raise NotImplementedError(f"{type(self).__name__} is no function of jax.lax")

    def in_storage(self, side: Side, stored_axes: Axes) -> "Operation | None":
        """The contraction of an operand with its axes stored in another order.

        Args:
            side: side of the operand.
            stored_axes: position of each axis of the operand in storage.

        Returns:
            A contraction with an equal result; None if there is none.
        """
        del side, stored_axes
        return None

    def masked(self, x: jax.Array) -> jax.Array:
        """Sets rows of lhs, or of the result, that take no part to zero."""
        return x

    @abc.abstractmethod
    def scale_to_output(self, side: Side, scale: jax.Array) -> jax.Array:
        """Lays out a scale of an operand to multiply the output.

        Args:
            side: side of the operand.
            scale: keepdims, of size 1 along contracting axes.
        """

    @abc.abstractmethod
    def rhs_scale_to_lhs(self, scale: jax.Array) -> jax.Array:
        """Lays out a scale of rhs to multiply lhs.

        Args:
            scale: keepdims, of size 1 along the remaining axes of rhs.
        """

    def lhs_scale_to_rhs(self, scale: jax.Array) -> jax.Array:
        """Lays out a scale of lhs to multiply rhs; only if `pairs_elements`.

        Args:
            scale: keepdims, of size 1 along the remaining axes of lhs.
        """
        raise NotImplementedError(f"{type(self).__name__} does not move scales of lhs")

    def rhs_scale_moves(self, scale_shape: tuple[int, ...]) -> bool:
        """Returns True if a scale of rhs of this shape can multiply lhs instead."""
        kept = self.axes("rhs").remaining
        return all(scale_shape[axis] == 1 for axis in kept)

    def of_tiles(self, counts: tuple[int, ...]) -> "Operation":
        """The contraction of a single tile, with the arrays of all tiles stacked.

        Args:
            counts: number of tiles of each pair of cuttable axes.

        Returns:
            An operation; its arrays, if any, have a new leading axis over tiles.
        """
        del counts
        return self

    def tiled(self, counts: tuple[int, ...]) -> "Operation":
        """The contraction of all tiles, with a batch axis for each axis that is cut.

        Args:
            counts: as in `of_tiles`.

        Returns:
            A contraction of the operands that `block_shapes.cut` returns. Its result
            has a leading axis for each axis that is cut, still to be summed over.
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
        """Contracts values, less their zero points (`DotInput.less_zero_point`).

        ``kind(contraction, lhs, rhs)`` sums the products of a `lowering.Contraction`:
        a `lowering.Dot` or `lowering.Conv`, or one with forms of its own.

        Args:
            kind: kind of dot: the type of the values and of their sums.
            lhs: stored integers, or floats.
            rhs: stored integers, or floats.
            out_sharding: sharding of the result.
        """


class Lowered(Contraction, Operation):
    """An operation that is itself the `Contraction` that kinds of dots take."""

    def contract(self, kind, lhs, rhs, out_sharding=None):
        del out_sharding  # Part of an operation that has one.
        if lhs.zero_point is None and rhs.zero_point is None:
            return kind(self, lhs, rhs)
        products = self.products(lhs.values.shape, rhs.values.shape)
        if not zero_points_leave_sums(kind, lhs, rhs, products):
            return kind(self, lhs.less_zero_point(), rhs.less_zero_point())
        sums = kind(self, DotInput(lhs.values), DotInput(rhs.values))
        # Intermediate values wrap modulo 2^32; the result fits int32.
        terms = _zero_point_terms(self, lhs, rhs, explicit_sharding(sums))
        return self.masked(sums.astype(jnp.int32) - terms)


def zero_points_leave_sums(
    kind: Kind, lhs: DotInput, rhs: DotInput, products: int
) -> bool:
    """Returns True if zero points may be subtracted from sums of stored values.

    This takes stored values of 8 bits, and sums that fit int32.

    Args:
        kind: Kind of dot.
        lhs: Input to the dot.
        rhs: Input to the dot.
        products: Number of products in a sum; a symbolic number (`jax.export`) is
            assumed to be small enough.
    """
    if not isinstance(kind, Integers):
        return False
    if lhs.zero_point is None and rhs.zero_point is None:
        return False
    is_wide = any(jnp.iinfo(one.values.dtype).bits > 8 for one in (lhs, rhs))
    bound = (lhs.largest or 0) * (rhs.largest or 0)
    is_long = isinstance(products, int) and products * bound >= 2**31
    return not (is_wide or is_long)


def _zero_point_terms(
    operation: Operation,
    lhs: DotInput,
    rhs: DotInput,
    out_sharding: NamedSharding | None,
) -> jax.Array:
    """Computes ``sum a b - sum (a - za) (b - zb)``, modulo 2^32.

    That is ``sum (a - za) zb + za sum b``, where each sum is over one operand. The sums
    of a frozen operand may be known. Zero points that vary along contracting axes stay
    inside of the sums.

    Args:
        operation: a contraction that sums over its contracting axes alone.
        lhs: stored integers.
        rhs: stored integers. At least one operand has a zero point.
        out_sharding: sharding of the sums that they are subtracted from, on a mesh with
            explicit axes.
    """

    def to_output(side: Side, x: jax.Array) -> jax.Array:
        return sharded_like(operation.scale_to_output(side, x), out_sharding)

    lhs_axes, rhs_axes = (operation.axes(side).contracting for side in ("lhs", "rhs"))
    found = []
    if rhs.zero_point is not None:
        a = lhs.values.astype(jnp.int32)
        if lhs.zero_point is not None:
            a = a - lhs.zero_point
        zb = rhs.zero_point
        if all(zb.shape[axis] == 1 for axis in rhs_axes):
            row = a.sum(lhs_axes, keepdims=True) if lhs.sums is None else lhs.sums
            found.append(to_output("lhs", row) * to_output("rhs", zb))
        else:
            factor = operation.rhs_scale_to_lhs(zb)
            a = a * sharded_like(factor, explicit_sharding(a))
            row = a.sum(lhs_axes, keepdims=True)
            found.append(to_output("lhs", row))
    if lhs.zero_point is not None:
        za = lhs.zero_point
        if all(za.shape[axis] == 1 for axis in lhs_axes):
            column = to_output("rhs", _sums_of(rhs, rhs_axes))
            found.append(to_output("lhs", za) * column)
        else:
            b, factor = rhs.values.astype(jnp.int32), operation.lhs_scale_to_rhs(za)
            b = b * sharded_like(factor, explicit_sharding(b))
            found.append(to_output("rhs", b.sum(rhs_axes, keepdims=True)))
    return sum(found[1:], start=found[0])


def _sums_of(x: DotInput, axes: Axes) -> jax.Array:
    """Sums stored integers over some axes, with keepdims, in int32."""
    if x.sums is None:
        return x.values.astype(jnp.int32).sum(axes, keepdims=True)
    if x.zero_point is None:
        return x.sums
    count = math.prod(x.values.shape[axis] for axis in axes)
    return x.sums + count * x.zero_point
