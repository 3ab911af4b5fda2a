"""Elementwise functions of float32, written out in operations with one result.

XLA's own differ between processors and with the size of an array: what does not fill a
vector is computed by other code. The forms are those of the Cephes library (S. Moshier,
single precision), within 2 units in the last place; each product and quotient goes
through a barrier, and sums are exact operations of IEEE 754.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.invariance.arithmetic import (
    Written,
    div,
    polynomial,
    sqrt,
    where,
)
from aqtlite.invariance.rounding import barrier, mul

_f = np.float32
_LN2 = _f(0.693145751953125), _f(1.428606820309417e-06)  # 15 bits, and the rest


_EXP = (
    *(1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3),
    *(4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1),
)


def _reduced_exp(x):
    """Returns n and ``exp(r) - 1`` for ``x = n log(2) + r``."""
    bounded = lax.clamp(_f(-104), x, _f(90))
    n = lax.round(mul(bounded, _f(1 / np.log(2))), lax.RoundingMethod.TO_NEAREST_EVEN)
    r = (bounded - mul(n, _LN2[0])) - mul(n, _LN2[1])
    return n.astype(jnp.int32), mul(mul(polynomial(r, _EXP), r), r) + r


def _power_of_two(n):
    """Returns 2^n for -126 <= n <= 127."""
    return lax.bitcast_convert_type((n + 127) << 23, jnp.float32)


def _exp(x):
    n, less_one = _reduced_exp(x)
    # In two steps, since 2^n may be too large or too small for a normal number.
    half = n >> 1
    y = mul(mul(less_one + _f(1), _power_of_two(half)), _power_of_two(n - half))
    return where(x != x, x, y)


def _expm1(x):
    n, less_one = _reduced_exp(x)
    half = n >> 1
    first, second = _power_of_two(half), _power_of_two(n - half)
    y = mul(mul(less_one, first), second) + (mul(first, second) - _f(1))
    y = where(n == 0, less_one, where(n > 40, _exp(x), y))
    return where(x != x, x, y)


def _exp2(x):
    whole = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
    bounded = lax.clamp(_f(-150), whole, _f(130)).astype(jnp.int32)
    half = bounded >> 1
    y = mul(_exp(mul(x - whole, _f(np.log(2)))), _power_of_two(half))
    y = mul(y, _power_of_two(bounded - half))
    return where(
        x != x, x, where(x < _f(-150), _f(0), where(x > _f(128), _f(np.inf), y))
    )


_LOG = (
    *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1),
    *(1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1),
    3.3333331174e-1,
)


def _log(x):
    # Subnormals, multiplied by 2^24.
    is_small = x < _f(2.0**-126)
    bits = lax.bitcast_convert_type(where(is_small, mul(x, _f(2.0**24)), x), jnp.int32)
    exponent = (bits >> 23) - where(is_small, np.int32(150), np.int32(126))
    mantissa = lax.bitcast_convert_type(
        (bits & np.int32(0x007FFFFF)) | np.int32(0x3F000000), jnp.float32
    )
    is_low = mantissa < _f(np.sqrt(0.5))
    n = where(is_low, exponent - 1, exponent).astype(jnp.float32)
    v = where(is_low, mantissa + mantissa, mantissa) - _f(1)
    square = mul(v, v)
    y = mul(mul(polynomial(v, _LOG), v), square)
    y = y + mul(n, _f(-2.12194440e-4))
    y = y - mul(square, _f(0.5))
    out = (v + y) + mul(n, _f(0.693359375))
    edge = where(x == 0, _f(-np.inf), where(x > 0, x, _f(np.nan)))
    return where((x > 0) & (x < _f(np.inf)), out, edge)


def _log1p(x):
    """``log(u) x / (u - 1)`` for ``u = 1 + x`` (W. Kahan)."""
    u = barrier(x + _f(1))
    less_one = u - _f(1)
    y = mul(_log(u), div(x, where(less_one == 0, _f(1), less_one)))
    y = where(less_one == 0, x, y)
    return where(x == _f(np.inf), x, y)


def _logistic(x):
    return div(lax.full_like(x, 1), _exp(-x) + _f(1))


_TANH = (
    *(-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2),
    *(1.33314422036e-1, -3.33332819422e-1),
)


def _tanh(x):
    size = lax.abs(x)
    large = _f(1) - div(lax.full_like(x, 2), _exp(size + size) + _f(1))
    square = mul(x, x)
    small = mul(mul(polynomial(square, _TANH), square), x) + x
    return where(size < _f(0.625), small, where(x < 0, -large, large))


_ERF = (
    *(7.853861353153693e-5, -8.010193625184903e-4, 5.188327685732524e-3),
    *(-2.685381193529856e-2, 1.128358514861418e-1, -3.761262582423300e-1),
    1.128379165726710,
)
_ERFC_TO_2 = (
    *(2.326819970068386e-2, -1.387039388740657e-1, 3.687424674597105e-1),
    *(-5.824733027278666e-1, 6.210004621745983e-1, -4.944515323274145e-1),
    *(3.404879937665872e-1, -2.741127028184656e-1, 5.638259427386472e-1),
)
_ERFC_FROM_2 = (
    *(-1.047766399936249e1, 1.297719955372516e1, -7.495518717768503),
    *(2.921019019210786, -1.015265279202700, 4.218463358204948e-1),
    *(-2.820767439740514e-1, 5.641895067754075e-1),
)


def _small_erf(x):
    return mul(polynomial(mul(x, x), _ERF), x)


def _large_erfc(size):
    """The complement for sizes from 1; above 11, it is zero."""
    size = lax.min(size, _f(11))
    inverse = div(lax.full_like(size, 1), size)
    square = mul(inverse, inverse)
    low = polynomial(square, _ERFC_TO_2)
    high = polynomial(square, _ERFC_FROM_2)
    # exp(-x^2), with x^2 in two parts of which the first is exact.
    first = lax.reduce_precision(size, 8, 11)
    rest = mul(first - size, first + size)
    decay = mul(_exp(-mul(first, first)), _exp(rest))
    return mul(mul(decay, inverse), where(size < _f(2), low, high))


def _erf(x):
    size = lax.abs(x)
    large = _f(1) - _large_erfc(lax.max(size, _f(1)))
    return where(size < _f(1), _small_erf(x), where(x < 0, -large, large))


def _erfc(x):
    size = lax.abs(x)
    large = _large_erfc(lax.max(size, _f(1)))
    large = where(size > _f(11), _f(0), large)
    return where(
        size < _f(1), _f(1) - _small_erf(x), where(x < 0, _f(2) - large, large)
    )


_ERF_INV_CENTER = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06),
    *(0.00021858087, -0.00125372503, -0.00417768164, 0.246640727, 1.50140941),
)
_ERF_INV_TAIL = (
    *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844),
    *(0.00573950773, -0.0076224613, 0.00943887047, 1.00167406, 2.83297682),
)


def _erf_inv(x):
    """The approximation of M. Giles (2010), of which `jax.random.normal` is made."""
    w = -_log1p(-mul(x, x))
    center = polynomial(w - _f(2.5), _ERF_INV_CENTER)
    tail = polynomial(sqrt(lax.max(w, _f(5))) - _f(3), _ERF_INV_TAIL)
    out = mul(where(w < _f(5), center, tail), x)
    return where(lax.abs(x) == 1, x * _f(np.inf), out)


def _split(x):
    """Returns two parts of at most 12 bits, whose products are exact (T. J. Dekker)."""
    high = lax.reduce_precision(x, 8, 11)
    return high, x - high


def _product(x, y):
    """Returns a product, and what its rounding took off."""
    product = mul(x, y)
    (x1, x2), (y1, y2) = _split(x), _split(y)
    error = ((mul(x1, y1) - product) + mul(x1, y2)) + mul(x2, y1)
    return product, error + mul(x2, y2)


def _log_in_two_parts(x):
    """Returns ``log(x) = 2 atanh((m - 1) / (m + 1)) + n log(2)`` as a sum of two."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    mantissa = lax.bitcast_convert_type(
        (bits & np.int32(0x007FFFFF)) | np.int32(0x3F800000), jnp.float32
    )
    is_high = mantissa > _f(np.sqrt(2))
    m = where(is_high, mul(mantissa, _f(0.5)), mantissa)
    n = ((bits >> 23) - where(is_high, np.int32(126), np.int32(127))).astype(
        jnp.float32
    )
    over, under = barrier(m - _f(1)), barrier(m + _f(1))
    lost = m - barrier(under - _f(1))
    s = div(over, under)
    product, error = _product(s, under)
    rest = div(((over - product) - error) - mul(s, lost), under)
    square = mul(s, s)
    series = polynomial(square, (2 / 11, 2 / 9, 2 / 7, 2 / 5, 2 / 3))
    low = mul(mul(series, square), s) + mul(rest, _f(2))
    whole = mul(n, _LN2[0])
    twice = s + s
    high = whole + twice
    low = low + ((whole - high) + twice) + mul(n, _LN2[1])
    total = high + low
    return total, (high - total) + low


def _pow(x, y):
    size = lax.abs(x)
    is_normal = (size >= _f(2.0**-126)) & (size < _f(np.inf))
    high, low = _log_in_two_parts(where(is_normal, size, lax.full_like(x, 1)))
    edge = where(size < _f(1), _f(-np.inf), _f(np.inf))
    high, low = where(is_normal, high, edge), where(is_normal, low, _f(0))
    exponent, rest = _product(where(is_normal, high, _f(1)), y)
    rest = rest + mul(low, y)
    out = mul(_exp(exponent), _f(1) + _expm1(rest))
    out = where(
        is_normal,
        where(lax.abs(exponent) < _f(90), out, _exp(exponent)),
        _exp(mul(high, y)),
    )
    whole = lax.floor(y)
    half = mul(whole, _f(0.5))
    is_odd = (whole == y) & (lax.floor(half) != half)
    is_negative = lax.bitcast_convert_type(x, jnp.int32) < 0
    out = where(is_negative & is_odd, -out, out)
    out = where((x < 0) & (whole != y) & (size < _f(np.inf)), _f(np.nan), out)
    out = where((x != x) | (y != y), _f(np.nan), out)
    is_one = (x == 1) | ((x == -1) & (lax.abs(y) == _f(np.inf)))
    return where((y == 0) | is_one, _f(1), out)


EXP = Written(lax.exp, _exp, lambda y, x: (y,))
LOG = Written(lax.log, _log, lambda y, x: (1 / x,))


def _slopes_of_pow(z, x, y):
    by_base = jnp.where(y == 0, 0, y * POW(x, jnp.where(y == 0, 1, y - 1)))
    log = jnp.where(x == 0, jnp.where(y > 0, 0, -jnp.inf), LOG(jnp.where(x == 0, 1, x)))
    return by_base, log * z


POW = Written(lax.pow, _pow, _slopes_of_pow)


def _slope_of_erf(y, x):
    del y
    return (_f(2 / np.sqrt(np.pi)) * EXP(-x * x),)


def _slope_of_erf_inv(y, x):
    del x
    return (_f(np.sqrt(np.pi) / 2) * EXP(y * y),)


UNARY = {
    "exp": EXP,
    "exp2": Written(lax.exp2, _exp2, lambda y, x: (_f(np.log(2)) * y,)),
    "expm1": Written(lax.expm1, _expm1, lambda y, x: (y + 1,)),
    "log": LOG,
    "log1p": Written(lax.log1p, _log1p, lambda y, x: (1 / (x + 1),)),
    "logistic": Written(lax.logistic, _logistic, lambda y, x: (y * (1 - y),)),
    "tanh": Written(lax.tanh, _tanh, lambda y, x: ((1 + y) * (1 - y),)),
    "erf": Written(lax.erf, _erf, _slope_of_erf),
    "erfc": Written(lax.erfc, _erfc, lambda y, x: (-_slope_of_erf(y, x)[0],)),
    "erf_inv": Written(lax.erf_inv, _erf_inv, _slope_of_erf_inv),
}
"""Functions of one argument, by the name of their primitive."""
