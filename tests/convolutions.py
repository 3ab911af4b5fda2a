"""Convolutions to test with, and a reference that knows no library's convolution."""

import itertools
from typing import NamedTuple

import numpy as np


class Case(NamedTuple):
    """A convolution of NHWC with HWIO."""

    lhs: tuple[int, ...] = (2, 5, 6, 3)
    rhs: tuple[int, ...] = (3, 2, 3, 4)
    strides: tuple[int, int] = (1, 1)
    padding: tuple[tuple[int, int], ...] = ((1, 1), (0, 1))
    lhs_dilation: tuple[int, int] = (1, 1)
    rhs_dilation: tuple[int, int] = (1, 1)
    feature_groups: int = 1
    batch_groups: int = 1

    @property
    def geometry(self):
        """The arguments of `lax.conv_general_dilated` from the strides on."""
        numbers = "NHWC", "HWIO", "NHWC"
        return *self[2:6], numbers, *self[6:]


CASES = {
    "plain": Case(),
    "strides": Case(strides=(2, 3), padding=((0, 2), (1, -1))),
    "dilations": Case(lhs_dilation=(2, 1), rhs_dilation=(1, 2)),
    "groups": Case(lhs=(2, 5, 6, 4), rhs=(3, 2, 2, 6), feature_groups=2),
    "depthwise": Case(lhs=(2, 5, 6, 3), rhs=(3, 2, 1, 3), feature_groups=3),
    "multiplier": Case(
        lhs=(2, 5, 6, 3), rhs=(3, 2, 1, 6), strides=(2, 1), feature_groups=3
    ),
    "batch_groups": Case(lhs=(4, 5, 6, 3), rhs=(3, 2, 3, 4), batch_groups=2),
    "wide": Case(lhs=(2, 4, 40, 1), rhs=(2, 20, 1, 4)),
    "wide_strides": Case(
        rhs=(4, 4, 3, 2), strides=(2, 1), rhs_dilation=(1, 2), padding=((2, 2), (3, 1))
    ),
    "pointwise": Case(rhs=(1, 1, 3, 4), padding=((0, 0), (0, 0))),
}


def reference(case: Case, x, w):
    """The convolution, and a function to its two gradients, of NumPy arrays."""
    padded, inside = _padded(case, x)
    counts = [
        (size - (k - 1) * d - 1) // s + 1
        for size, k, d, s in zip(
            padded.shape[1:3],
            w.shape,
            case.rhs_dilation,
            case.strides,
            strict=False,
        )
    ]
    groups = max(case.feature_groups, case.batch_groups)
    axis = 3 if case.feature_groups > 1 else 0

    def parts(array, axis):
        return np.split(array, groups, axis)

    def windows():
        for k in itertools.product(*map(range, w.shape[:2])):
            spans = [
                slice(i * d, i * d + (count - 1) * s + 1, s)
                for i, d, s, count in zip(
                    k, case.rhs_dilation, case.strides, counts, strict=True
                )
            ]
            yield k, (slice(None), *spans)

    def of_group(x, w):
        return sum(x[at] @ w[k] for k, at in windows())

    out = np.concatenate(
        [of_group(*one) for one in zip(parts(padded, axis), parts(w, 3), strict=True)],
        3,
    )

    def gradients(g):
        dx, dw = np.zeros_like(padded), np.zeros_like(w)
        operands = parts(padded, axis), parts(w, 3), parts(g, 3)
        # Views, which are written to.
        results = parts(dx, axis), parts(dw, 3)
        for x1, w1, g1, dx1, dw1 in zip(*operands, *results, strict=True):
            for k, at in windows():
                dx1[at] += g1 @ w1[k].T
                dw1[k] += np.einsum("nhwi,nhwo->io", x1[at], g1)
        back = np.zeros_like(x)
        source, target = inside
        back[target] = dx[source]
        return back, dw

    return out, gradients


def _padded(case, x):
    """The padded and dilated input, and where each element of the input lies in it."""
    sizes, source, target = [], [slice(None)], [slice(None)]
    for size, (low, high), step in zip(
        x.shape[1:3], case.padding, case.lhs_dilation, strict=True
    ):
        full = (size - 1) * step + 1 + low + high
        sizes.append(full)
        kept = [i for i in range(size) if 0 <= low + i * step < full]
        target.append(slice(kept[0], kept[-1] + 1))
        first, last = (low + i * step for i in (kept[0], kept[-1]))
        source.append(slice(first, last + 1, step))
    padded = np.zeros((x.shape[0], *sizes, x.shape[3]), x.dtype)
    inside = tuple(source), tuple(target)
    padded[inside[0]] = x[inside[1]]
    return padded, inside


def integers(shape, seed=0):
    """Random int64 that int8 holds."""
    rng = np.random.default_rng([seed, *shape])
    return rng.integers(-127, 128, shape)
