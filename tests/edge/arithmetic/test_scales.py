import jax
import numpy as np

from aqtlite.edge.arithmetic import scales

_RNG = np.random.default_rng(0)


def _mantissas(count):
    return _RNG.integers(2**23, 2**24, count)


def _close_to_halves(count):
    """Scales whose fixed-point quotient lies just below a half, for float64 on it."""
    divisors, firsts = _mantissas(count) | 1, _mantissas(count)
    found = []
    for divisor, x in zip(divisors.tolist(), firsts.tolist(), strict=True):
        for below in (1, 2, 3):
            try:
                y = -below * pow(256 * x, -1, divisor) % divisor
            except ValueError:
                continue
            half, rest = divmod(x * y * 256 + below, divisor)
            if 2**23 <= y < 2**24 and half % 2 and half >= 2**31:
                assert rest == 0
                found.append((x, y, divisor))
    return np.array(found, np.float32).T


def _everywhere(count):
    exponents = _RNG.integers(-50, 0, (3, count))
    return np.ldexp(_mantissas((3, count)), exponents).astype(np.float32)


def test_factors_in_a_program_are_those_of_known_scales():
    near = _close_to_halves(3000)
    assert near.shape[1] > 100
    of_powers = _everywhere(1000)
    of_powers[2] = 2.0 ** _RNG.integers(-30, 3, 1000)
    x, y, divisor = np.concatenate([near, _everywhere(5000), of_powers], 1)
    for function in (scales.factor, scales.fixed_factor):
        known, computed = (run(x, y, divisor) for run in (function, jax.jit(function)))
        for one, other in zip(
            jax.tree.leaves(known), jax.tree.leaves(computed), strict=True
        ):
            np.testing.assert_array_equal(one, other)


def test_vanishing_factors():
    x = np.float32([1e-30, 2.0**-32, 2.0**-31, 1.0])
    known, computed = (
        run(x, np.float32(1), np.float32(1))
        for run in (scales.fixed_factor, jax.jit(scales.fixed_factor))
    )
    for one, other in zip(known, computed, strict=True):
        np.testing.assert_array_equal(one, other)
    assert known[0][0] == 0
