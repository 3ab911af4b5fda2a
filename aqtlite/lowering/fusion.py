"""Values that XLA does not compute inside of the loops that read them.

XLA:CPU fuses the computation of a small array into its consumers, each of which then
finds it again, and compiles them differently than where the array is given. The
functions here keep such values in kernels of their own.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering import exact
from aqtlite.lowering.elementwise import Elementwise
from aqtlite.lowering.packing import Packing
from aqtlite.lowering.target import OnCpu
from aqtlite.shapes.sharding import explicit_sharding


def barrier(x: jax.Array) -> jax.Array:
    """Returns `x`, and keeps XLA from fusing its computation into its consumers.

    Consumers of `x` are then compiled alike, whether it is computed or given. XLA:CPU
    removes an optimization barrier before fusion, but does not fuse a reduction of
    several arrays with its consumers; other platforms keep the barrier.

    Args:
        x: any shape. Meant for small arrays: a CPU also writes a byte per element.
    """
    return _Barrier()(x)


def with_reciprocal(scale: jax.Array, unit: float) -> tuple[jax.Array, jax.Array]:
    """Returns a scale and its `reciprocal`, which takes these arguments."""
    return scale, reciprocal(scale, unit)


def behind_barrier(scale: jax.Array, unit: float) -> tuple[jax.Array, jax.Array]:
    """Returns a scale behind a `barrier`, and its `reciprocal`.

    On CPUs, one kernel finds both: no kernels stand beside each other, and XLA:CPU
    hands on those of a program without branches faster.

    Args:
        scale: float32, any shape.
        unit: as for `reciprocal`.
    """
    both = _BehindBarrier(unit)(scale)
    found, quotient = (lax.index_in_dim(both, i, keepdims=False) for i in (0, 1))
    return found, quotient


def with_reciprocal_behind_barrier(
    scale: jax.Array, unit: float
) -> tuple[jax.Array, jax.Array]:
    """Returns a scale as it is, and the reciprocal that `behind_barrier` finds."""
    return scale, _ReciprocalBehindBarrier(unit)(scale)


def reciprocal(scale: jax.Array, unit: float) -> jax.Array:
    """Computes ``unit / scale``.

    Args:
        scale: float32, any shape.
        unit: scaled value of one stored unit.
    """
    return exact.on_squeezed(Elementwise(_quotient, (unit,)), scale)


def _quotient(unit: float, scale: jax.Array) -> jax.Array:
    return lax.div(lax.full_like(scale, unit), scale)


def sum_of_products(*factors: tuple[jax.Array, jax.Array | np.float32]) -> jax.Array:
    """Computes ``a * b + c * d + ...`` from the left, with each product rounded.

    Unlike `exact.rounded_product`, this takes factors whose signs are all known, such
    as magnitudes and constants.

    Args:
        factors: pairs that broadcast to one shape. Meant for small arrays, as
            `barrier`.
    """
    products = jnp.broadcast_arrays(*(a * b for a, b in factors))
    total, *others = barrier(jnp.stack(products))
    for product in others:
        total = total + product
    return total


@dataclasses.dataclass(frozen=True)
class _Barrier(OnCpu):
    """The identity, as a kernel of its own."""

    def reference(self, x):
        return lax.optimization_barrier(x)

    def packing(self, known, types):
        return _Given() if known else None

    def on_cpu(self, is_whole, x):
        """Reduces two copies of `x` to one of them."""
        if x.dtype.itemsize == 1 and jnp.issubdtype(x.dtype, jnp.floating):
            # XLA:CPU computes with such floats by widening them.
            bits = self.on_cpu(is_whole, lax.bitcast_convert_type(x, jnp.uint8))
            return lax.bitcast_convert_type(bits, x.dtype)
        return exact.on_squeezed(lambda x: later_of_two(x)[0], x)

    def type_of(self, x):
        return x


@dataclasses.dataclass(frozen=True)
class _BehindBarrier(OnCpu):
    """A scale and its reciprocal, stacked, from a kernel of their own."""

    unit: float

    def reference(self, x):
        return _stack(lax.optimization_barrier(x), _quotient(self.unit, x))

    def packing(self, known, types):
        return _GivenScale(self.unit) if known else None

    def on_cpu(self, is_whole, x):
        axes = tuple(axis for axis, size in enumerate(x.shape) if size == 1)
        both = _with_reciprocal(lax.squeeze(x, axes), self.unit)
        # XLA reads a part of a concatenation as what was concatenated.
        return _stack(*(lax.expand_dims(one, axes) for one in both))

    def type_of(self, x):
        return x.update(shape=(2, *x.shape), weak_type=False)


@dataclasses.dataclass(frozen=True)
class _ReciprocalBehindBarrier(OnCpu):
    """The reciprocal that a `_BehindBarrier` finds."""

    unit: float

    def reference(self, x):
        return _quotient(self.unit, x)

    def on_cpu(self, is_whole, x):
        return exact.on_squeezed(lambda x: _with_reciprocal(x, self.unit)[1], x)

    def type_of(self, x):
        return x


def _stack(*arrays: jax.Array) -> jax.Array:
    return lax.concatenate([lax.expand_dims(one, (0,)) for one in arrays], 0)


def later_of_two(*arrays: jax.Array) -> Sequence[jax.Array]:
    """Returns arrays of one shape from a kernel that XLA:CPU fuses with no consumer.

    It reduces two copies of each to the later one.
    """
    return _later_of_two(*map(_copies, arrays))


def _copies(x: jax.Array) -> jax.Array:
    return lax.broadcast(x, (2,))


def _with_reciprocal(scale: jax.Array, unit: float) -> Sequence[jax.Array]:
    """Reduces two copies of a scale to one, and to its reciprocal."""
    copies, zero = _copies(scale), np.zeros((), scale.dtype)
    operands = copies, lax.full_like(copies, 1)
    reducer = functools.partial(_not_zero, unit)
    found: Sequence[jax.Array] = lax.reduce(operands, (zero, zero), reducer, (0,))
    return found


def _not_zero(unit, one, other):
    # XLA would split a reduction whose results do not depend on each other. Only at its
    # start are both zero: a scale is not negative.
    is_zero = lax.eq(lax.add(*other), lax.full_like(other[0], 0))
    scale = lax.select(is_zero, one[0], other[0])
    return scale, _quotient(unit, scale)


def _positions(copies: jax.Array) -> jax.Array:
    sharding = explicit_sharding(copies)
    return lax.broadcasted_iota(jnp.int8, copies.shape, 0, out_sharding=sharding)


def _later_of_two(*pairs: jax.Array) -> list[jax.Array]:
    # XLA makes one reduction of two that have equal operands, and fuses it.
    operands = (*pairs, _positions(pairs[0]))
    start = (*(np.zeros((), x.dtype) for x in pairs), np.int8(-1))
    *found, _ = lax.reduce(operands, start, _later, (0,))
    return found


def _later(one, other):
    is_later = lax.ge(other[-1], one[-1])
    found = map(functools.partial(lax.select, is_later), other[:-1], one[:-1])
    return (*found, lax.max(one[-1], other[-1]))


@dataclasses.dataclass(frozen=True)
class _Given(Packing):
    """A value that consumers read as they would behind a fusion barrier."""

    argument: int = 0
    layout: ClassVar[str] = "given"

    def pack(self, args):
        return (args[self.argument],)

    def run(self, packed, args):
        return packed[0]


@dataclasses.dataclass(frozen=True)
class _GivenScale(Packing):
    """A scale and its reciprocal, stacked, as behind a barrier."""

    unit: float
    argument: int = 0

    @property
    def layout(self):
        return "with reciprocal", self.unit

    def pack(self, args):
        scale = args[self.argument]
        return (_stack(scale, _quotient(self.unit, scale)),)

    def run(self, packed, args):
        return packed[0]
