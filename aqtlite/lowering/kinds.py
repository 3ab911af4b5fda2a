"""The kinds of dots, each implemented once for all contractions.

Before: `contraction/accumulation.py`, which chose a kind of dot.
Next: `contraction/differentiation.py`, which scales the sums and has their gradients.

| kind              | CPUs                                  | other platforms     |
| ----------------- | ------------------------------------- | ------------------- |
| `Integers`        | `sums`, of digits and in pieces       | the same            |
| `IntegersInFloat` | `Integers`                            | `Floats`            |
| `Mixed`           | `sums`, of digits of the floats, too  | `Floats`            |
| `Narrow`          | `Integers`, otherwise `narrow_on_cpu` | `narrow`            |
| `Floats`          | `sums`                                | `sums`              |

Lower-case names are methods of `Contraction`: `dot`, `conv` and `ragged` define how
each platform sums products.
"""

import abc
import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering import digits, long_sums
from aqtlite.lowering.contraction import Contraction, DotInput
from aqtlite.lowering.digits import Digits
from aqtlite.lowering.forms import gpu, narrow
from aqtlite.lowering.target import Target, TargetDependent

_LARGEST_SUM = 2**31 - 1


class Kind(abc.ABC):
    """A kind of dot. Subclasses are frozen dataclasses."""

    @abc.abstractmethod
    def __call__(
        self, contraction: Contraction, lhs: DotInput, rhs: DotInput
    ) -> jax.Array:
        """Contracts two operands without zero points."""


class _SpecialOnCpu(Kind):
    """A kind of dot with a form of its own for CPUs."""

    accumulator: np.dtype | None
    """Float dtype to which sums are rounded; None for float32."""

    @abc.abstractmethod
    def elsewhere(
        self, contraction: Contraction, lhs: DotInput, rhs: DotInput
    ) -> jax.Array:
        """The form for other platforms, which also defines the derivative."""

    @abc.abstractmethod
    def on_cpu(
        self, contraction: Contraction, lhs: DotInput, rhs: DotInput, target: Target
    ) -> jax.Array:
        """The form for CPUs."""

    def __call__(self, contraction, lhs, rhs):
        leaves, structure = jax.tree.flatten(contraction)
        static = tuple((one.largest, one.unit) for one in (lhs, rhs))
        return _OnTarget(self, structure, static)(lhs.values, rhs.values, *leaves)


@dataclasses.dataclass(frozen=True)
class _OnTarget(TargetDependent):
    """A kind of dot of one contraction."""

    is_composite = True

    kind: _SpecialOnCpu
    structure: Any
    """Pytree structure of the contraction."""

    static: tuple[tuple[int | None, float | None], ...]
    """The largest magnitude and the unit of each operand."""

    def reference(self, *arrays):
        return self.kind.elsewhere(*self._of(*arrays))

    def lowered(self, target, *arrays):
        if target.platform != "cpu":
            return self.reference(*arrays)
        contraction, lhs, rhs = self._of(*arrays)
        sums = self.kind.on_cpu(contraction, lhs, rhs, target)
        return sums.astype(self.kind.accumulator or jnp.float32)

    def _of(self, lhs, rhs, *leaves):
        left, right = (
            DotInput(values, None, *static)
            for values, static in zip((lhs, rhs), self.static, strict=True)
        )
        return jax.tree.unflatten(self.structure, leaves), left, right


@dataclasses.dataclass(frozen=True)
class Integers(Kind):
    """Stored integers, summed exactly: int4, int8, int16, or int32 of three digits.

    The sums are int32 if they are certain to fit. Otherwise they are float32: exact
    totals of integers of up to 8 bits (`long_sums`), or exact int32 sums of pieces and
    of digits, added in float32.
    """

    accumulator: np.dtype | None = None
    """Float dtype to which sums are rounded. None: sums are int32, and totals that may
    not fit it float32."""

    def __call__(self, contraction, lhs, rhs):
        contraction, lhs, rhs = contraction.in_best_order(lhs, rhs)
        if _is_one_digit(lhs) and _is_one_digit(rhs):
            return self._of_one_digit(contraction, lhs, rhs)
        left, right = (Digits.of_integers(x.values, x.largest) for x in (lhs, rhs))
        return _sums(contraction, left, right)

    def _of_one_digit(self, contraction, lhs, rhs):
        largest = (
            int(jnp.iinfo(x.values.dtype).max) if x.largest is None else x.largest
            for x in (lhs, rhs)
        )
        limit = _LARGEST_SUM // math.prod(largest)
        products = contraction.products(lhs.values.shape, rhs.values.shape)
        # A symbolic size (`jax.export`) is assumed to fit: it cannot be cut.
        if isinstance(products, int) and products > limit:
            return long_sums.of_pieces(
                contraction, lhs.values, rhs.values, limit, self.accumulator
            )
        return contraction.sums_in(self.accumulator, lhs.values, rhs.values)


@dataclasses.dataclass(frozen=True)
class IntegersInFloat(_SpecialOnCpu):
    """Stored integers contracted in a float dtype that holds them, to float32.

    CPUs contract the integers instead: that is faster, and the sums, which the float
    contraction approximates, are equal in every program.
    """

    in_dtype: np.dtype
    accumulator: np.dtype | None = None

    def elsewhere(self, contraction, lhs, rhs):
        kind = Floats(None, self.accumulator)
        return _as_floats(kind, contraction, lhs, rhs, self.in_dtype)

    def on_cpu(self, contraction, lhs, rhs, target):
        return Integers()(contraction, lhs, rhs).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Mixed(_SpecialOnCpu):
    """Floats by stored integers, to float32.

    CPUs split the floats into three int8 digits, or two if both they and the result
    have 16 bits: three int8 contractions take less time than a float contraction that
    widens integers, and unlike sums of floats, their sums are equal in every program.
    On other platforms the integers are widened, which compilers fuse with the
    contraction.
    """

    out_dtype: np.dtype
    """Final dtype of the result."""

    precision: lax.PrecisionLike = None
    """Precision of a contraction of floats; sums of digits have float32's."""

    accumulator: np.dtype | None = None

    def elsewhere(self, contraction, lhs, rhs):
        floats = (lhs if _is_float(lhs) else rhs).values
        kind = Floats(self.precision, self.accumulator)
        return _as_floats(kind, contraction, lhs, rhs, floats.dtype)

    def on_cpu(self, contraction, lhs, rhs, target):
        sums = contraction.sums_of_floats(
            target, lhs.values, rhs.values, self.out_dtype
        )
        if sums is not None:
            return sums
        left, right = (
            Digits.of_floats(x.values, contraction.unit_axes(side), self.out_dtype)
            if _is_float(x)
            else Digits.of_integers(x.values, x.largest)
            for side, x in (("lhs", lhs), ("rhs", rhs))
        )
        if target.partitions == 1:
            sums = contraction.by_blocks(_sums, left, right)
        else:
            sums = _sums(contraction, left, right)
        if left.unit is not None:
            return sums * contraction.scale_to_output("lhs", left.unit)
        return sums * contraction.scale_to_output("rhs", right.unit)


@dataclasses.dataclass(frozen=True)
class Narrow(_SpecialOnCpu):
    """Floats of 8 bits, which hold fp8, fp6 and fp4, summed in float32.

    Their products are exact in float32. CPUs contract small multiples of a unit as
    integers, with exact sums.
    """

    accumulator: np.dtype | None = None

    def elsewhere(self, contraction, lhs, rhs):
        return contraction.narrow(lhs.values, rhs.values, self.accumulator)

    def on_cpu(self, contraction, lhs, rhs, target):
        largest = lhs.largest, rhs.largest
        units = narrow.units_of_integers((lhs.unit, rhs.unit), largest)
        if units is None:
            is_whole = target.partitions == 1
            return contraction.narrow_on_cpu(lhs.values, rhs.values, is_whole)
        left, right = (
            DotInput(narrow.in_units(x.values, unit), None, x.largest)
            for x, unit in zip((lhs, rhs), units, strict=True)
        )
        sums = Integers()(contraction, left, right)
        return sums.astype(jnp.float32) * np.float32(units[0] * units[1])


@dataclasses.dataclass(frozen=True)
class Floats(Kind):
    """Floats, summed in float32, or in float64 for float64."""

    precision: lax.PrecisionLike = None
    accumulator: np.dtype | None = None
    """Float dtype to which sums are rounded; None for the dtype of the sums."""

    def __call__(self, contraction, lhs, rhs):
        # A gradient may be wider than its operand, for users who forbid JAX to promote.
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.promote_types(lhs.values.dtype, rhs.values.dtype)
        left, right = lhs.values.astype(dtype), rhs.values.astype(dtype)
        return contraction.sums_in(self.accumulator, left, right, self.precision)


def _is_one_digit(x: DotInput) -> bool:
    return jnp.iinfo(x.values.dtype).bits <= 8


def _is_float(x: DotInput) -> bool:
    return jnp.issubdtype(x.values.dtype, jnp.floating)


def _as_floats(
    kind: Floats, contraction: Contraction, lhs: DotInput, rhs: DotInput, dtype: Any
) -> jax.Array:
    """Contracts operands cast to a float dtype, to float32 or the accumulator."""
    left, right = (DotInput(gpu.converted(x.values, dtype)) for x in (lhs, rhs))
    sums = kind(contraction, left, right)
    return sums.astype(kind.accumulator or jnp.float32)


def _sums(contraction: Contraction, lhs: Digits, rhs: Digits) -> jax.Array:
    """Contracts operands as digits; sums for floats are float32, in units of digits."""
    parts = _parts(contraction, lhs, rhs)
    if lhs.unit is None and rhs.unit is None:
        (sums,) = parts
        return sums
    if parts[0].dtype == jnp.float32:
        return digits.combine(parts)
    products = contraction.products(lhs.shape, rhs.shape)
    is_known = isinstance(products, int)  # It is not in a symbolic export.
    largest = products * lhs.largest * rhs.largest if is_known else None
    return digits.rounded(parts, largest)


def _parts(contraction: Contraction, lhs: Digits, rhs: Digits) -> list[jax.Array]:
    """The sums for each digit of floats; for integers, one array of combined sums."""
    products = contraction.products(lhs.shape, rhs.shape)
    # A symbolic size (`jax.export`) is assumed to fit: it cannot be cut.
    is_known = isinstance(products, int)
    fits = not is_known or products * lhs.largest * rhs.largest <= _LARGEST_SUM
    limit = _LARGEST_SUM // (lhs.largest_digit * rhs.largest_digit)
    if not fits and products > limit:
        of_pieces = [
            [part.astype(jnp.float32) for part in _parts(piece, lhs.cut(a), rhs.cut(b))]
            for piece, a, b in contraction.pieces(lhs.shape, rhs.shape, limit)
        ]
        return [
            functools.reduce(operator.add, parts)
            for parts in zip(*of_pieces, strict=True)
        ]
    # The sums of each digit fit int32, even if the combined sums do not.
    dtype = jnp.int32 if fits else jnp.float32
    split = lhs.is_split, rhs.is_split
    sums = contraction.sums_of_digits(lhs.split(), rhs.split(), split)
    # The digits of integers are combined first.
    rows = sums if rhs.unit is None else zip(*sums, strict=True)
    parts = [digits.combine([one.astype(dtype) for one in row]) for row in rows]
    has_floats = lhs.unit is not None or rhs.unit is not None
    return parts if has_floats else [digits.combine(parts)]
