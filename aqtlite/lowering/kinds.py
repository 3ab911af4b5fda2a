"""The kinds of dots, each written once for all contractions.

| kind              | CPUs                                  | other platforms     |
| ----------------- | ------------------------------------- | ------------------- |
| `Integers`        | `sums`, of digits and in pieces       | the same            |
| `IntegersInFloat` | `Integers`                            | `Floats`            |
| `Mixed`           | `sums`, of digits of the floats, too  | `Floats`            |
| `Narrow`          | `Integers`, otherwise `narrow_on_cpu` | `narrow`            |
| `Floats`          | `sums`                                | `sums`              |

In small letters are methods of a `Contraction`: how a platform sums products is in the
file of the contraction, `dot`, `conv` or `ragged`.
"""

import abc
import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering import digits, gpu, narrow
from aqtlite.lowering.contraction import Contraction, DotInput
from aqtlite.lowering.digits import Digits
from aqtlite.lowering.target import OnCpu

_LARGEST_SUM = 2**31 - 1


class Kind(abc.ABC):
    """A kind of dot. Subclasses are frozen dataclasses."""

    @abc.abstractmethod
    def __call__(
        self, contraction: Contraction, lhs: DotInput, rhs: DotInput
    ) -> jax.Array:
        """Contracts two operands that have no zero points."""


class _SpecialOnCpu(Kind):
    """A kind of dot with a form of its own for CPUs."""

    @abc.abstractmethod
    def elsewhere(
        self, contraction: Contraction, lhs: DotInput, rhs: DotInput
    ) -> jax.Array:
        """The form of other platforms. It gives the derivative."""

    @abc.abstractmethod
    def on_cpu(
        self, contraction: Contraction, lhs: DotInput, rhs: DotInput, is_whole: bool
    ) -> jax.Array:
        """The form of CPUs; `is_whole` if each device sees whole arrays."""

    def __call__(self, contraction, lhs, rhs):
        leaves, structure = jax.tree.flatten(contraction)
        static = tuple((one.largest, one.unit) for one in (lhs, rhs))
        return _OnTarget(self, structure, static)(lhs.values, rhs.values, *leaves)


@dataclasses.dataclass(frozen=True)
class _OnTarget(OnCpu):
    """A kind of dot of one contraction."""

    kind: _SpecialOnCpu
    structure: Any
    """The contraction, less its arrays."""

    static: tuple[tuple[int | None, float | None], ...]
    """The largest magnitude and the unit of each operand."""

    def reference(self, *arrays):
        return self.kind.elsewhere(*self._of(*arrays))

    def on_cpu(self, is_whole, *arrays):
        contraction, lhs, rhs = self._of(*arrays)
        return self.kind.on_cpu(contraction, lhs, rhs, is_whole)

    def _of(self, lhs, rhs, *leaves):
        left, right = (
            DotInput(values, None, *static)
            for values, static in zip((lhs, rhs), self.static, strict=True)
        )
        return jax.tree.unflatten(self.structure, leaves), left, right


@dataclasses.dataclass(frozen=True)
class Integers(Kind):
    """Stored integers, exactly: int4, int8, int16, or int32 of three digits.

    The sums are int32 where int32 is certain to hold them. Otherwise they are float32:
    exact sums of pieces, or of digits, that int32 does hold, added there.
    """

    def __call__(self, contraction, lhs, rhs):
        contraction, lhs, rhs = contraction.in_best_order(lhs, rhs)
        left, right = (Digits.of_integers(x.values, x.largest) for x in (lhs, rhs))
        return _sums(contraction, left, right)


@dataclasses.dataclass(frozen=True)
class IntegersInFloat(_SpecialOnCpu):
    """Stored integers as values of a float dtype that holds them, to float32.

    A CPU contracts the integers: their sums are those that the float contraction
    approaches, the same in every program, and sooner there.
    """

    in_dtype: np.dtype

    def elsewhere(self, contraction, lhs, rhs):
        return _as_floats(Floats(), contraction, lhs, rhs, self.in_dtype)

    def on_cpu(self, contraction, lhs, rhs, is_whole):
        return Integers()(contraction, lhs, rhs).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Mixed(_SpecialOnCpu):
    """Floats by stored integers, to float32.

    A CPU takes the floats apart into three int8 digits, or two where both they and the
    result are of 16 bits: three int8 contractions take less time than a float one that
    widens integers, and their sums are the same in every program, which those of floats
    are not. Elsewhere the integers are widened, which compilers fuse with the
    contraction.
    """

    out_dtype: np.dtype
    """In which the result is wanted in the end."""

    precision: lax.PrecisionLike = None
    """Of a contraction of floats; sums of digits have that of float32."""

    def elsewhere(self, contraction, lhs, rhs):
        floats = (lhs if _is_float(lhs) else rhs).values
        kind = Floats(self.precision)
        return _as_floats(kind, contraction, lhs, rhs, floats.dtype)

    def on_cpu(self, contraction, lhs, rhs, is_whole):
        left, right = (
            Digits.of_floats(x.values, contraction.unit_axes(side), self.out_dtype)
            if _is_float(x)
            else Digits.of_integers(x.values, x.largest)
            for side, x in (("lhs", lhs), ("rhs", rhs))
        )
        if is_whole:
            sums = contraction.by_blocks(_sums, left, right)
        else:
            sums = _sums(contraction, left, right)
        if left.unit is not None:
            return sums * contraction.scale_to_output("lhs", left.unit)
        return sums * contraction.scale_to_output("rhs", right.unit)


@dataclasses.dataclass(frozen=True)
class Narrow(_SpecialOnCpu):
    """Floats of 8 bits, which hold fp8, fp6 and fp4, summed in float32.

    Every product of two of them is exact in float32. CPUs contract small multiples of a
    unit as integers, whose sums are exact.
    """

    def elsewhere(self, contraction, lhs, rhs):
        return contraction.narrow(lhs.values, rhs.values)

    def on_cpu(self, contraction, lhs, rhs, is_whole):
        largest = lhs.largest, rhs.largest
        units = narrow.units_of_integers((lhs.unit, rhs.unit), largest)
        if units is None:
            return contraction.narrow_on_cpu(lhs.values, rhs.values, is_whole)
        left, right = (
            DotInput(narrow.in_units(x.values, unit), None, x.largest)
            for x, unit in zip((lhs, rhs), units, strict=True)
        )
        sums = Integers()(contraction, left, right)
        return sums.astype(jnp.float32) * np.float32(units[0] * units[1])


@dataclasses.dataclass(frozen=True)
class Floats(Kind):
    """Floats, summed in float32 or in what is wider."""

    precision: lax.PrecisionLike = None

    def __call__(self, contraction, lhs, rhs):
        dtype = jnp.promote_types(lhs.values.dtype, rhs.values.dtype)
        left, right = lhs.values.astype(dtype), rhs.values.astype(dtype)
        return contraction.sums(left, right, self.precision)


def _is_float(x: DotInput) -> bool:
    return jnp.issubdtype(x.values.dtype, jnp.floating)


def _as_floats(
    kind: Floats, contraction: Contraction, lhs: DotInput, rhs: DotInput, dtype: Any
) -> jax.Array:
    """Contracts operands as floats of a dtype, to float32."""
    left, right = (DotInput(gpu.converted(x.values, dtype)) for x in (lhs, rhs))
    return kind(contraction, left, right).astype(jnp.float32)


def _sums(contraction: Contraction, lhs: Digits, rhs: Digits) -> jax.Array:
    """Contracts what digits make: of floats in their units, to float32."""
    parts = _parts(contraction, lhs, rhs)
    if lhs.unit is None and rhs.unit is None:
        (sums,) = parts
        return sums
    return digits.combine([part.astype(jnp.float32) for part in parts])


def _parts(contraction: Contraction, lhs: Digits, rhs: Digits) -> list[jax.Array]:
    """The sums for each digit of floats; if there are none, those of all digits."""
    products = contraction.products(lhs.shape, rhs.shape)
    # A symbolic size (jax.export) is taken to fit: it cannot be cut.
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
    # If int32 does not hold the sums, it holds those of each digit.
    dtype = jnp.int32 if fits else jnp.float32
    split = lhs.is_split, rhs.is_split
    sums = contraction.sums_of_digits(lhs.split(), rhs.split(), split)
    # The digits of integers first.
    rows = sums if rhs.unit is None else zip(*sums, strict=True)
    parts = [digits.combine([one.astype(dtype) for one in row]) for row in rows]
    has_floats = lhs.unit is not None or rhs.unit is not None
    return parts if has_floats else [digits.combine(parts)]
