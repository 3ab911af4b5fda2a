"""Fixed-point arithmetic of constants, in NumPy's 64-bit integers.

What depends on one int8 is a table: these functions make it.
"""

import numpy as np

from aqtlite.edge.arithmetic import fixed_point

Integers = np.ndarray
"""int64."""


def scaled(x: Integers, real: float | np.floating) -> Integers:
    """``x * real`` as fixed point, as `fixed_point.rounded_away`.

    Args:
        x: int64, in the range of int32.
        real: positive.
    """
    multiplier, shift = fixed_point.quantized_multiplier(float(real))
    return multiplied(x, int(multiplier), int(shift))


def multiplied(x: Integers, multiplier: int, shift: int) -> Integers:
    """``x * multiplier * 2**(shift - 31)``, as `fixed_point.rounded_away`."""
    high = high_product(x << max(shift, 0), np.int64(multiplier))
    return shifted_away(high, np.asarray(max(-shift, 0)))


def inverse_square_root(x: int) -> tuple[int, int]:
    """``1 / sqrt(x)`` as a multiplier and a shift, in five steps of Newton's method.

    Source: TFLite, ``GetInvSqrtQuantizedMultiplierExp`` in ``internal/common.h``.

    Args:
        x: from 1 to 2**29 - 1.
    """
    if x <= 1:
        return 2**31 - 1, 0
    pairs = (32 - x.bit_length() - 1) // 2 - 1
    shift = 11 - pairs
    fraction = (x << 2 * pairs) >> 1  # In units of 2**-28, as all that follows.
    half = (fraction + 1) >> 1
    root = 2**28
    for _ in range(5):
        cube = _product(_product(root, root), root)  # In units of 2**-22.
        cube = _clipped(cube << 6)
        # In units of 2**-25.
        rest = _product(2**28 + 2**27, root) - _product(half, cube)
        root = _clipped(rest << 3)
    root = _product(root, 1518500250)  # The square root of 1 / 2.
    return (root << -shift, 0) if shift < 0 else (root, -shift)


def saturated(x: np.ndarray) -> np.ndarray:
    """The nearest integers of int32."""
    return np.clip(x, -(2**31), 2**31 - 1)


def high_product(x: np.ndarray, y: np.ndarray | np.integer) -> np.ndarray:
    """``x * y / 2**31`` of int32 in int64, rounded half up but for negative ties."""
    product = x * y
    nudged = product + np.where(product >= 0, 2**30, 1 - 2**30)
    return np.sign(nudged) * (np.abs(nudged) >> 31)


def shifted_away(x: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """``x / 2**amount`` of int32, rounded, a half away from zero.

    An amount above 31 shifts by its low five bits, as an x86 processor does, and rounds
    as gemmlowp's ``RoundingDivideByPOT`` then does: what results is no quotient.
    """
    mask = np.where(amount > 31, -1, (np.int64(1) << np.minimum(amount, 31)) - 1)
    rounds_up = (x & mask) > (mask >> 1) + (x < 0)
    return (x >> (amount & 31)) + rounds_up


def _product(x: int, y: int) -> int:
    return int(high_product(np.asarray(x), np.asarray(y)))


def _clipped(x: int) -> int:
    return int(saturated(np.asarray(x)))
