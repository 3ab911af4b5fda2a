"""Estimated times of contractions, from the rates of a device: `Report.estimate`.

A contraction takes at least the time of its products, and that of its bytes: a roofline
(Williams et al., 2009, https://doi.org/10.1145/1498765.1498785). What it takes beside
is not known to the estimate.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from aqtlite.reporting.contraction import ReportedContraction


@dataclasses.dataclass(frozen=True)
class Rates:
    """Peak rates of a device, as its vendor gives them, without sparsity."""

    bandwidth: float
    """Bytes per second of its memory."""

    operations: Mapping[str, float]
    """Operations per second by dtype; a multiply-accumulate is two."""

    def of(self, dtype: str) -> float:
        """Returns the rate in a dtype: of the widest one that has one, for two."""
        names = dtype.split(" x ")
        rates = [self.operations[x] for x in names if x in self.operations]
        return min(rates or [self.operations["float32"]])


def _rates(bandwidth: float, wide: float, half: float, narrow: float) -> Rates:
    return Rates(
        bandwidth * 1e9,
        {
            "float32": wide * 1e12,
            **dict.fromkeys(("bfloat16", "float16"), half * 1e12),
            **dict.fromkeys(("int8", "int4", "uint8"), narrow * 1e12),
        },
    )


def _with_float8(rates: Rates) -> Rates:
    narrow = rates.operations["int8"]
    float8 = dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), narrow)
    return dataclasses.replace(rates, operations={**rates.operations, **float8})


DEVICES = {
    "A100": _rates(2039, 156, 312, 624),
    "H100": _with_float8(_rates(3350, 494, 989, 1979)),
    "H200": _with_float8(_rates(4800, 494, 989, 1979)),
    "TPU v5e": _rates(819, 99, 197, 394),
    "TPU v5p": _rates(2765, 230, 459, 918),
    "TPU v6e": _rates(1640, 459, 918, 1836),
}
"""Rates of devices by name, from their data sheets: NVIDIA's with TF32 for float32, and
Google's (https://cloud.google.com/tpu/docs), with half of bfloat16 for it."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Estimated times of a contraction, in seconds of one call of the function."""

    path: str
    role: str
    seconds: float
    """As it runs, with a pass over each operand that has to be quantized first."""

    float_seconds: float
    """The same contraction in bfloat16; of one in float, as it runs."""

    @property
    def is_float_faster(self) -> bool:
        """Whether it would be faster in float."""
        return self.float_seconds < self.seconds


def estimate(report: Any, device: str | Rates) -> tuple[Estimate, ...]:
    """Estimates the time of each contraction of a report.

    Args:
        report: a `Report`.
        device: name of a device in `DEVICES`, or the rates of another one.

    Raises:
        ValueError: if the device is unknown.
    """
    if not isinstance(device, Rates):
        if not isinstance(device, str) or device not in DEVICES:
            known = ", ".join(DEVICES)
            raise ValueError(
                f"no rates of a device {device!r} are known: give Rates, or one of "
                f"{known}"
            )
        device = DEVICES[device]
    return tuple(
        _of_contraction(one, device)
        for one in report.contractions
        if one.macs and one.in_dtypes
    )


def _of_contraction(one: ReportedContraction, rates: Rates) -> Estimate:
    macs = one.compiled_macs or one.macs or 0
    products = sum(
        2 * macs * part / rates.of(dtype) for dtype, part in one.in_dtypes.items()
    )
    sizes = [_size(x) * one.times for x in (one.lhs, one.rhs)]
    results = 4 * one.out_size * one.times
    widths = [_width(x) for x in (one.lhs, one.rhs)]
    read = sum(n * width for n, width in zip(sizes, widths, strict=True))
    passes = sum(
        (2 + width) * n
        for n, width, is_given in zip(
            sizes, widths, (False, one.is_frozen), strict=True
        )
        if width <= 1 and not is_given
    )
    seconds = max(products, (read + results) / rates.bandwidth)
    if one.is_float:
        return Estimate(one.path, one.role, seconds, seconds)
    in_float = 2 * (one.macs or 0) / rates.of("bfloat16")
    floats = 2 * sum(sizes) + results
    return Estimate(
        one.path,
        one.role,
        seconds + passes / rates.bandwidth,
        max(in_float, floats / rates.bandwidth),
    )


def _size(described: str) -> int:
    """Returns the number of elements of an operand such as "int8[8,64]"."""
    dims = re.search(r"\[(.*)\]", described)
    return math.prod(map(int, filter(None, dims[1].split(",")))) if dims else 0


def _width(described: str) -> float:
    """Returns the bytes of an element of an operand such as "int8[8,64]"."""
    bits = re.match(r"[a-z]+(\d+)", described)
    return int(bits[1]) / 8 if bits else 4
