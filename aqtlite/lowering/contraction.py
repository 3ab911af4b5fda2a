"""The interface of a contraction and its operands to the kinds of dots.

A contraction knows which elements of two arrays meet, and the form in which each
platform sums their products. What is done to values before and after is written once,
in `kinds`.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite.lowering import exact, plain
from aqtlite.lowering.digits import Digits
from aqtlite.lowering.target import Target, TargetDependent

Side = Literal["lhs", "rhs"]
Shape = tuple[int, ...]
Cut = Callable[[jax.Array], jax.Array]
Split = tuple[bool, bool]
"""Whether lhs, and rhs, have digits on a leading axis."""


class DotInput(NamedTuple):
    """The input to the dot of one operand: stored integers, or floats."""

    values: jax.Array
    zero_point: jax.Array | None = None
    """int32, keepdims; None for none."""

    largest: int | None = None
    """The largest magnitude of an integer less its zero point, None for that of the
    dtype without its minimum. Of a float, in units; None if it has no unit."""

    unit: float | None = None
    """The power of two of which floats are multiples; None if it is not known."""

    sums: jax.Array | None = None
    """int32, keepdims: the sums of integers less their zero point over the contracting
    axes; None if they are not known."""

    def less_zero_point(self) -> "DotInput":
        """Subtracts the zero point, which makes int16 or int32 of the values."""
        if self.zero_point is None:
            return self
        values = self.values.astype(jnp.int32) - self.zero_point
        if self.largest is not None and self.largest <= jnp.iinfo(jnp.int16).max:
            values = values.astype(jnp.int16)
        return DotInput(values, None, self.largest)


class Contraction(abc.ABC):
    """Sums of products of two arrays.

    Subclasses are frozen dataclasses and pytrees: what is static is a meta field, an
    array that is no operand (the sizes of groups) a data field.
    """

    @abc.abstractmethod
    def anywhere(
        self, lhs: jax.Array, rhs: jax.Array, precision: lax.PrecisionLike
    ) -> jax.Array:
        """The sums in a form that every platform has."""

    @abc.abstractmethod
    def on_target(
        self,
        target: Target,
        lhs: jax.Array,
        rhs: jax.Array,
        precision: lax.PrecisionLike,
    ) -> jax.Array:
        """The sums in the form for a target."""

    def sums(
        self, lhs: jax.Array, rhs: jax.Array, precision: lax.PrecisionLike = None
    ) -> jax.Array:
        """Contracts in the form for the target, and floats of 16 bits in float32.

        Args:
            lhs: int4, int8, or floating.
            rhs: int4 or int8 with either of them, floats of the same dtype.
            precision: as `lax.dot_general` takes it.

        Returns:
            int32, or at least float32.
        """
        leaves, structure = jax.tree.flatten(self)
        return _Sums(structure, precision)(lhs, rhs, *leaves)

    def sums_of_digits(
        self, lhs: jax.Array, rhs: jax.Array, split: Split
    ) -> list[list[jax.Array]]:
        """Contracts each digit of lhs with each of rhs.

        Args:
            lhs: int4 or int8.
            rhs: int4 or int8.
            split: which have digits on a leading axis; what has none is one digit.

        Returns:
            For each digit of lhs the sums with those of rhs, int32.
        """
        left, right = (
            plain.unstacked(x, 0) if is_split else [x]
            for x, is_split in zip((lhs, rhs), split, strict=True)
        )
        return [[self.sums(a, b) for b in right] for a in left]

    def in_best_order(
        self, lhs: DotInput, rhs: DotInput
    ) -> tuple["Contraction", DotInput, DotInput]:
        """The contraction and its operands, exchanged if integers are summed sooner."""
        return self, lhs, rhs

    @abc.abstractmethod
    def products(self, lhs: Shape, rhs: Shape) -> int:
        """The number of products in a sum; symbolic, perhaps (`jax.export`)."""

    @abc.abstractmethod
    def pieces(
        self, lhs: Shape, rhs: Shape, limit: int
    ) -> Iterator[tuple["Contraction", Cut, Cut]]:
        """Contractions of at most so many products, whose sums add up to all.

        Returns:
            For each the contraction, and what cuts its operands from lhs and rhs.
        """

    def by_blocks(
        self,
        contract: Callable[["Contraction", Digits, Digits], jax.Array],
        lhs: Digits,
        rhs: Digits,
    ) -> jax.Array:
        """Contracts digits of floats with integers, in blocks if sums are many."""
        return contract(self, lhs, rhs)

    @abc.abstractmethod
    def unit_axes(self, side: Side) -> tuple[int, ...]:
        """The axes along which the floats of an operand share a unit of digits."""

    @abc.abstractmethod
    def scale_to_output(self, side: Side, scale: jax.Array) -> jax.Array:
        """Lays a scale of an operand out so that it multiplies the output.

        Args:
            side: the operand.
            scale: keepdims, of size 1 along contracting axes.
        """

    def narrow(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """Contracts floats of 8 bits on GPUs and TPUs: bfloat16 holds them."""
        return self.sums(lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16))

    def narrow_on_cpu(
        self, lhs: jax.Array, rhs: jax.Array, is_whole: bool
    ) -> jax.Array:
        """Contracts floats of 8 bits on CPUs: float32 holds them.

        The order of its sums depends on the layout of what is fused into the dot.
        """
        del is_whole
        lhs, rhs = (exact.fusion_barrier(x.astype(jnp.float32)) for x in (lhs, rhs))
        return self.sums(lhs, rhs)


@dataclasses.dataclass(frozen=True)
class _Sums(TargetDependent):
    """The sums of a contraction."""

    structure: Any
    """The contraction, less its arrays."""

    precision: lax.PrecisionLike

    def reference(self, lhs, rhs, *leaves):
        contraction = jax.tree.unflatten(self.structure, leaves)
        return contraction.anywhere(lhs, rhs, self.precision)

    def lowered(self, target, lhs, rhs, *leaves):
        contraction = jax.tree.unflatten(self.structure, leaves)
        if target.platform == "cpu" and jnp.issubdtype(lhs.dtype, jnp.floating):
            # XLA:CPU has few kernels that sum halves in float32.
            wide = jnp.promote_types(lhs.dtype, jnp.float32)
            lhs, rhs = lhs.astype(wide), rhs.astype(wide)
        return contraction.on_target(target, lhs, rhs, self.precision)
