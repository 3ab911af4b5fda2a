import fractions
import math

import jax
import numpy as np
import pytest

from aqtlite.edge.arithmetic import fixed_point

_HALF = fractions.Fraction(1, 2)
_RNG = np.random.default_rng(0)
_X = np.concatenate(
    [
        [-(2**31), 2**31 - 1, -1, 0, 1],
        _RNG.integers(-(2**31), 2**31, 200),
        _RNG.integers(-300, 300, 200),
    ]
).astype(np.int32)
_REALS = (1e-9, 0.0003, 0.25, 0.49999999999, 0.75, 1.0)


def _away(x):
    return int(math.copysign(math.floor(abs(x) + _HALF), x))


def _twice(x, multiplier, shift, second):
    high = math.floor(fractions.Fraction(x * multiplier, 2**31) + _HALF)
    return second(fractions.Fraction(high, 2**-shift))


def _upward(x):
    return math.floor(x + _HALF)


_EXACT = {
    "once": lambda x, m, s: _upward(fractions.Fraction(x * m, 2 ** (31 - s))),
    "upward": lambda x, m, s: _twice(x, m, s, _upward),
    "away": lambda x, m, s: _twice(x, m, s, _away),
}


@pytest.mark.parametrize("real", _REALS)
@pytest.mark.parametrize("rounding", sorted(_EXACT))
def test_products_are_those_of_integers_without_bounds(rounding, real):
    multiplier, shift = map(int, fixed_point.quantized_multiplier(real))
    if shift > 0:  # 1.0 is 0.5 * 2.
        multiplier, shift = 2**31 - 1, 0
    expected = [_EXACT[rounding](int(x), multiplier, shift) for x in _X]
    run = jax.jit(lambda x: fixed_point.multiply(x, multiplier, shift, rounding))
    np.testing.assert_array_equal(run(_X), expected)


def test_products_of_40_bits():
    multiplier, shift = map(int, fixed_point.quantized_multiplier(3e-6))
    high = _RNG.integers(-(2**30), 2**30, 300).astype(np.int32)
    low = _RNG.integers(-(2**30), 2**30, 300).astype(np.int32)
    short = (multiplier + 2**15) >> 16
    sums = [256 * int(a) + int(b) for a, b in zip(high, low, strict=True)]
    expected = [_upward(fractions.Fraction(x * short, 2 ** (15 - shift))) for x in sums]
    run = jax.jit(lambda a, b: fixed_point.rounded_short(a, b, multiplier, shift))
    np.testing.assert_array_equal(run(high, low), expected)


@pytest.mark.parametrize("real", [0.0003, 0.75, 1.7, 19.3])
def test_constants_and_arrays_are_multiplied_alike(real):
    x = np.arange(-256, 256)
    fixed = fixed_point.quantized_multiplier(real)
    np.testing.assert_array_equal(
        fixed_point.scaled(x, real),
        fixed_point.rounded_away(x.astype(np.int32), *fixed),
    )
