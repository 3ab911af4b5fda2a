"""Sine and cosine of float32, accurate for all arguments.

A multiple of pi / 2 is taken off, and what is left goes into the polynomials of the
Cephes library (S. Moshier, single precision).
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.invariance.arithmetic import Written, polynomial, where
from aqtlite.invariance.rounding import mul
from aqtlite.lowering import exact, fusion
from aqtlite.lowering.target import OnCpu

_f, _u = np.float32, np.uint32

# pi / 2: three parts of 8 bits, whose products with integers to 2^16 are exact.
_HALF_PI = (1.5703125, 0.0004825592041015625, 1.2665987014770508e-06)
_HALF_PI_REST = _f(9.920935796805404e-10)
_LARGEST = _f(1e5)
"""Arguments up to it are reduced by these parts."""

_SIN = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)


def _sin_from(quarters: int, x):
    """Returns the sine of x and some quarters of a turn."""
    turns = lax.round(mul(x, _f(2 / np.pi)), lax.RoundingMethod.TO_NEAREST_EVEN)
    turns = lax.clamp(_f(-(2.0**17)), turns, _f(2.0**17))
    r = x
    for part in _HALF_PI:
        r = r - mul(turns, _f(part))
    r = r - mul(turns, _HALF_PI_REST)
    is_large = lax.abs(x) > _LARGEST
    large_turns, large_r = _reduced_exactly(x)
    r = where(is_large, large_r, r)
    quadrant = where(is_large, large_turns, turns.astype(jnp.int32)) + quarters
    square = mul(r, r)
    sine = mul(mul(polynomial(square, _SIN), square), r) + r
    cosine = mul(mul(polynomial(square, _COS), square), square)
    cosine = (cosine - mul(square, _f(0.5))) + _f(1)
    out = where((quadrant & 1) == 1, cosine, sine)
    out = where((quadrant & 2) == 2, -out, out)
    return where(lax.is_finite(x), out, _f(np.nan))


_FIRST = 143
"""Exponent field of 2^16, from which arguments are reduced exactly."""

# 2 / pi = 0.A2F9836E4E44..., of which the first bits come after 9 zeros.
_TWO_OVER_PI = 0xA2F9836E4E441529FC2757D1F534DDC0DB6295993C439041FE5163AB >> 9
_WORDS = [_u(_TWO_OVER_PI >> (32 * (6 - i)) & 0xFFFFFFFF) for i in range(7)]


def _reduced_exactly(x):
    """Returns whole quarters of a turn, modulo 4, and the rest of x, from 2^16 on.

    Integer arithmetic (M. Payne, R. Hanek, 1983): x is an integer of 24 bits times
    2^e. The bits of 2 / pi whose products with it are multiples of 4 are skipped, and
    96 bits from there on leave an error below 2^-70.
    """
    bits = lax.bitcast_convert_type(lax.abs(x), jnp.uint32)
    integer = _or(_and(bits, 0x007FFFFF), 0x00800000)
    exponent = lax.max(_right(bits, _u(23)), _u(_FIRST))
    skipped = lax.sub(exponent, _u(_FIRST))
    words = _words_from(_right(skipped, _u(5)))
    shift = _and(skipped, 31)
    rest = lax.sub(_u(31), shift)
    high, middle, low = (
        lax.bitwise_or(lax.shift_left(one, shift), _right(_right(other, _u(1)), rest))
        for one, other in itertools.pairwise(words)
    )
    carried = _high_product(integer, low)
    fraction = lax.add(lax.mul(integer, middle), carried)
    carry = lax.convert_element_type(lax.lt(fraction, carried), jnp.uint32)
    whole = lax.add(lax.mul(integer, high), _high_product(integer, middle))
    whole = lax.add(whole, carry)  # In units of 2^-30 quarters, modulo 4.
    quarters = _right(lax.add(whole, _u(1 << 29)), _u(30))
    left = _signed(lax.sub(whole, lax.shift_left(quarters, _u(30))))
    parts = left.astype(jnp.float32), _signed(_right(fraction, _u(8)))
    rest = mul(parts[0], _f(2.0**-30)) + mul(parts[1].astype(jnp.float32), _f(2.0**-54))
    r, turns = mul(rest, _f(np.pi / 2)), _signed(quarters)
    is_negative = x < 0
    return where(is_negative, -turns, turns), where(is_negative, -r, r)


def _words_from(place):
    """Returns four words of 2 / pi from a place on, up to 3."""
    is_second, is_third = lax.ge(place, _u(1)), lax.ge(place, _u(2))
    is_fourth = lax.ge(place, _u(3))
    found = []
    for i in range(4):
        word = where(is_second, _WORDS[i + 1], _WORDS[i])
        word = where(is_third, _WORDS[i + 2], word)
        found.append(where(is_fourth, _WORDS[i + 3], word))
    return found


def _high_product(x, y):
    """Returns the upper half of a product, of 24 and 32 bits."""
    x_high, x_low = _right(x, _u(16)), _and(x, 0xFFFF)
    y_high, y_low = _right(y, _u(16)), _and(y, 0xFFFF)
    middle = lax.add(lax.mul(x_low, y_high), _right(lax.mul(x_low, y_low), _u(16)))
    other = lax.add(lax.mul(x_high, y_low), _and(middle, 0xFFFF))
    upper = lax.add(lax.mul(x_high, y_high), _right(middle, _u(16)))
    return lax.add(upper, _right(other, _u(16)))


def _right(x: jax.Array, count) -> jax.Array:
    return lax.shift_right_logical(x, count)


def _and(x: jax.Array, mask: int) -> jax.Array:
    return lax.bitwise_and(x, _u(mask))


def _or(x: jax.Array, mask: int) -> jax.Array:
    return lax.bitwise_or(x, _u(mask))


def _signed(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _slope_of_sin(y, x):
    del y
    return (COS(x),)


SIN = Written(lax.sin, functools.partial(_sin_from, 0), _slope_of_sin)
COS = Written(lax.cos, functools.partial(_sin_from, 1), lambda y, x: (-SIN(x),))


PAIR = "sin", "cos"
"""Names of the primitives."""


def sine_and_cosine(x: jax.Array) -> dict[str, jax.Array]:
    """Returns both, by the names of their primitives, from one kernel."""
    values = SIN(x), COS(x)
    return {name: _Together(i)(*values) for i, name in enumerate(PAIR)}


class Pair:
    """Rules for a sine and a cosine of one argument.

    Both are computed where the first is asked for, and the other is kept until it is.
    """

    def __init__(self) -> None:
        self._kept: dict[str, jax.Array] = {}

    def __call__(self, name: str, params: Any, x: jax.Array) -> jax.Array:
        """Returns the one of a name, as a rule does."""
        del params
        if name not in self._kept:
            self._kept = sine_and_cosine(x)
        return self._kept.pop(name)


@dataclasses.dataclass(frozen=True)
class _Together(OnCpu):
    """One of two arrays that are computed in one kernel, each for the other's sake.

    XLA finds the kernel twice where a program reads both, as rotary embeddings do, and
    the reduction of the argument twice in it, and keeps one of each.
    """

    number: int

    def reference(self, *both):
        return lax.optimization_barrier(both)[self.number]

    def on_cpu(self, is_whole, *both):
        del is_whole
        return exact.on_squeezed(self._later, *both)

    def _later(self, *both):
        return fusion.later_of_two(*both)[self.number]

    def type_of(self, *both):
        return both[self.number]

    def tangent(self, out, args, tangents):
        del out, args
        return tangents[self.number]
