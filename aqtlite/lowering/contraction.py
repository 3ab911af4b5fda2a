"""The interface between contractions and the kinds of dots.

A contraction defines which elements of two arrays are multiplied, and the form in which
each platform sums the products. The steps before and after are written once, in
`kinds`.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering import exact, float8, fusion
from aqtlite.lowering.digits import Digits
from aqtlite.lowering.forms import plain
from aqtlite.lowering.packing import Packing
from aqtlite.lowering.target import Target, TargetDependent
from aqtlite.shapes.dimension_numbers import Side

Shape = tuple[int, ...]
Cut = Callable[[jax.Array], jax.Array]
Split = tuple[bool, bool]
"""Whether lhs and rhs have digits on a leading axis."""
IsMapped = tuple[bool, bool]
"""Whether a contraction is mapped over an axis of lhs and of rhs."""


class DotInput(NamedTuple):
    """The input to the dot of one operand: stored integers, or floats."""

    values: jax.Array
    zero_point: jax.Array | None = None
    """Zero point, int32, keepdims, or None."""

    largest: int | None = None
    """Largest magnitude of the integers less their zero point; None for the maximum of
    the dtype. For floats, largest magnitude in units; None without a unit."""

    unit: float | None = None
    """Power of two that divides all floats; None if it is not known."""

    sums: jax.Array | None = None
    """Sums of integers less their zero point over the contracting axes, int32,
    keepdims; None if they are not known."""

    def less_zero_point(self) -> "DotInput":
        """Subtracts the zero point; the values become int16 or int32."""
        if self.zero_point is None:
            return self
        values = self.values.astype(jnp.int32) - self.zero_point
        if self.largest is not None and self.largest <= jnp.iinfo(jnp.int16).max:
            values = values.astype(jnp.int16)
        return DotInput(values, None, self.largest)


class Contraction(abc.ABC):
    """Sums of products of two arrays.

    Subclasses are frozen dataclasses and pytrees: static fields are meta fields, and
    arrays other than the operands (the sizes of groups) are data fields.
    """

    @abc.abstractmethod
    def anywhere(
        self, lhs: jax.Array, rhs: jax.Array, precision: lax.PrecisionLike
    ) -> jax.Array:
        """Contracts in a form that every platform supports."""

    @abc.abstractmethod
    def on_target(
        self,
        target: Target,
        lhs: jax.Array,
        rhs: jax.Array,
        precision: lax.PrecisionLike,
    ) -> jax.Array:
        """Contracts in the form for a target."""

    def sums(
        self, lhs: jax.Array, rhs: jax.Array, precision: lax.PrecisionLike = None
    ) -> jax.Array:
        """Contracts in the form for the target, and sums floats in at least float32.

        Args:
            lhs: int4, int8 or floating.
            rhs: int4 or int8 for integers, the dtype of lhs for floats.
            precision: as in `lax.dot_general`.

        Returns:
            int32, or at least float32.
        """
        leaves, structure = jax.tree.flatten(self)
        return _Sums(structure, precision)(lhs, rhs, *leaves)

    def sums_in(
        self,
        dtype: np.dtype | None,
        lhs: jax.Array,
        rhs: jax.Array,
        precision: lax.PrecisionLike = None,
    ) -> jax.Array:
        """Contracts as `sums`, and rounds the sums to a float dtype; None for none."""
        if dtype is None:
            return self.sums(lhs, rhs, precision)
        leaves, structure = jax.tree.flatten(self)
        return _RoundedSums(structure, dtype, precision)(lhs, rhs, *leaves)

    def rounded_on_gpu(
        self,
        target: Target,
        dtype: np.dtype,
        lhs: jax.Array,
        rhs: jax.Array,
        precision: lax.PrecisionLike,
    ) -> jax.Array:
        """The form of `sums_in` for a GPU, which rounds in the product if it can."""
        del target
        return exact.rounded(self.sums(lhs, rhs, precision), dtype)

    def sums_of_digits(
        self, lhs: jax.Array, rhs: jax.Array, split: Split
    ) -> list[list[jax.Array]]:
        """Contracts each digit of lhs with each digit of rhs.

        Args:
            lhs: int4 or int8.
            rhs: int4 or int8.
            split: whether each operand has digits on a leading axis; otherwise it is a
                single digit.

        Returns:
            The sums for each digit of lhs and each digit of rhs, int32.
        """
        left, right = (
            plain.unstacked(x, 0) if is_split else [x]
            for x, is_split in zip((lhs, rhs), split, strict=True)
        )
        return [[self.sums(a, b) for b in right] for a in left]

    def mapped(self, axes: IsMapped) -> "tuple[Contraction, int] | None":
        """Returns the contraction of operands of which some have a new leading axis.

        Args:
            axes: whether lhs and rhs have one, over which the contraction is mapped.

        Returns:
            The contraction, and the position of the axis in the result; None if it is
            not a contraction of this kind.
        """
        del axes
        return None

    def in_best_order(
        self, lhs: DotInput, rhs: DotInput
    ) -> tuple["Contraction", DotInput, DotInput]:
        """Exchanges the operands of a contraction of integers if that is faster."""
        return self, lhs, rhs

    def packing(
        self,
        known: frozenset[int],
        lhs: jax.ShapeDtypeStruct,
        rhs: jax.ShapeDtypeStruct,
    ) -> Packing | None:
        """Returns how `sums` packs an operand, as `TargetDependent.packing`."""
        del known, lhs, rhs
        return None

    @abc.abstractmethod
    def products(self, lhs: Shape, rhs: Shape) -> int:
        """The number of products in a sum, which may be symbolic (`jax.export`)."""

    @abc.abstractmethod
    def pieces(
        self, lhs: Shape, rhs: Shape, limit: int
    ) -> Iterator[tuple["Contraction", Cut, Cut]]:
        """Cuts the contraction into pieces of at most `limit` products.

        Returns:
            Each piece, and functions that cut its operands from lhs and rhs. The sums
            of all pieces add up to the sums of the contraction.
        """

    def by_blocks(
        self,
        contract: Callable[["Contraction", Digits, Digits], jax.Array],
        lhs: Digits,
        rhs: Digits,
    ) -> jax.Array:
        """Contracts digits of floats with integers, in blocks if sums are many."""
        return contract(self, lhs, rhs)

    def sums_of_floats(
        self, target: Target, lhs: jax.Array, rhs: jax.Array, out_dtype: np.dtype
    ) -> jax.Array | None:
        """Contracts floats with integers by a kernel that has their digits inside.

        Args:
            target: target of the program, a CPU.
            lhs: floating or integers.
            rhs: integers or floating.
            out_dtype: final dtype of the contraction.

        Returns:
            float32; None if there is no such kernel.
        """
        del target, lhs, rhs, out_dtype
        return None

    @abc.abstractmethod
    def unit_axes(self, side: Side) -> tuple[int, ...]:
        """The axes along which the floats of an operand share a unit of digits."""

    @abc.abstractmethod
    def scale_to_output(self, side: Side, scale: jax.Array) -> jax.Array:
        """Lays out a scale of an operand to multiply the output.

        Args:
            side: side of the operand.
            scale: keepdims, of size 1 along contracting axes.
        """

    def narrow(
        self, lhs: jax.Array, rhs: jax.Array, dtype: np.dtype | None = None
    ) -> jax.Array:
        """Contracts floats of 8 bits on GPUs and TPUs; bfloat16 holds them.

        The sums are rounded as by `sums_in`.
        """
        left, right = lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16)
        return self.sums_in(dtype, left, right)

    def narrow_on_cpu(
        self, lhs: jax.Array, rhs: jax.Array, is_whole: bool
    ) -> jax.Array:
        """Contracts floats of 8 bits on CPUs; float32 holds them."""
        del is_whole
        # The order of sums depends on the layout of producers fused into the dot.
        lhs, rhs = (fusion.barrier(float8.widened(x)) for x in (lhs, rhs))
        return self.sums(lhs, rhs)


@dataclasses.dataclass(frozen=True)
class _Sums(TargetDependent):
    """The sums of a contraction."""

    structure: Any
    """Pytree structure of the contraction."""

    precision: lax.PrecisionLike

    def reference(self, lhs, rhs, *leaves):
        contraction = jax.tree.unflatten(self.structure, leaves)
        return contraction.anywhere(lhs, rhs, self.precision)

    def packing(self, known, types):
        lhs, rhs, *leaves = types
        contraction = jax.tree.unflatten(self.structure, leaves)
        return contraction.packing(known, lhs, rhs)

    def mapped(self, axes, *args):
        found = None
        if len(args) == 2 and jnp.issubdtype(args[0].dtype, jnp.integer):
            contraction = jax.tree.unflatten(self.structure, ())
            found = contraction.mapped((axes[0] is not None, axes[1] is not None))
        if found is None:
            return super().mapped(axes, *args)
        contraction, new = found
        lhs, rhs = (
            x if axis is None else jnp.moveaxis(x, axis, 0)
            for x, axis in zip(args, axes, strict=True)
        )
        return jnp.moveaxis(contraction.sums(lhs, rhs, self.precision), new, 0)

    def lowered(self, target, lhs, rhs, *leaves):
        contraction = jax.tree.unflatten(self.structure, leaves)
        if target.platform == "cpu" and jnp.issubdtype(lhs.dtype, jnp.floating):
            # XLA:CPU has few kernels that sum 16-bit floats in float32.
            wide = np.promote_types(lhs.dtype, np.float32)
            lhs, rhs = lhs.astype(wide), rhs.astype(wide)
        return contraction.on_target(target, lhs, rhs, self.precision)


@dataclasses.dataclass(frozen=True)
class _RoundedSums(TargetDependent):
    """The sums of a contraction, rounded to a float dtype."""

    is_composite = True

    structure: Any
    """Pytree structure of the contraction."""

    dtype: np.dtype
    precision: lax.PrecisionLike

    def reference(self, lhs, rhs, *leaves):
        contraction = jax.tree.unflatten(self.structure, leaves)
        return contraction.sums(lhs, rhs, self.precision).astype(self.dtype)

    def lowered(self, target, lhs, rhs, *leaves):
        if not target.is_gpu:
            return self.reference(lhs, rhs, *leaves)
        contraction = jax.tree.unflatten(self.structure, leaves)
        return contraction.rounded_on_gpu(target, self.dtype, lhs, rhs, self.precision)
