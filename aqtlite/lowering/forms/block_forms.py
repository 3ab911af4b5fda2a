"""The form in which each platform contracts floats of 8 bits with a scale per block.

CPUs contract the scaled values in float32, which defines the result. The forms of other
platforms have the same products, and sum them in another order.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from aqtlite.lowering.forms import processor
from aqtlite.lowering.target import Target

Form = Literal["float32", "bfloat16", "by block", "block-scaled"]
"""How operands in blocks are contracted:

- "float32": their scaled values, in one product of float32;
- "bfloat16": their scaled values, which bfloat16 holds exactly, in one product;
- "by block": the stored values, in a product for each block, whose sums are scaled;
- "block-scaled": the stored values and their scales, in one product that takes both.
"""

_E2M1, _E4M3, _E5M2, _E8M0 = (
    jnp.dtype(name)
    for name in ("float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
)


class BlockType(NamedTuple):
    """The type of an operand in blocks, as far as its form depends on it."""

    mantissa_bits: int
    """Mantissa bits of the values."""

    smallest: float
    """Power of two that divides all values."""

    bound: float
    """Largest value."""

    scale_dtype: np.dtype | None
    """Dtype of the scales: float8_e8m0fnu for powers of two, one of
    `calibration.scale_grids.RELATIVE_DTYPES`, or None for float32."""

    size: int
    """Number of elements of the last contracting axis in a block."""

    def is_held_by(self, dtype: DTypeLike) -> bool:
        """Returns True if a float dtype represents all values."""
        info = jnp.finfo(dtype)
        return (
            self.mantissa_bits <= info.nmant
            and self.smallest >= float(info.smallest_subnormal)
            and self.bound <= float(info.max)
        )

    @property
    def fits_bfloat16(self) -> bool:
        """Whether bfloat16 holds the values times the values of the scale's dtype."""
        if self.scale_dtype is None:
            return False
        bits = self.mantissa_bits + 1
        if self.scale_dtype != _E8M0:
            bits += jnp.finfo(self.scale_dtype).nmant + 1
        return bits <= jnp.finfo(jnp.bfloat16).nmant + 1


class Codes(NamedTuple):
    """The dtypes of a block-scaled product."""

    lhs: np.dtype
    rhs: np.dtype
    scale: np.dtype


def codes_of(lhs: BlockType, rhs: BlockType) -> Codes | None:
    """Returns the dtypes in which Blackwell's matrix units take operands.

    They take MXFP8 and NVFP4 (`jax.nn.scaled_matmul`). MXFP6 and MXFP4 are among the
    values of MXFP8. None if operands are of no such type.
    """
    dtypes, sizes = {lhs.scale_dtype, rhs.scale_dtype}, {lhs.size, rhs.size}
    if dtypes == {_E8M0} and sizes == {32}:
        left, right = map(_float8_of, (lhs, rhs))
        return None if left is None or right is None else Codes(left, right, _E8M0)
    is_four = lhs.is_held_by(_E2M1) and rhs.is_held_by(_E2M1)
    if dtypes == {_E4M3} and sizes == {16} and is_four:
        return Codes(_E2M1, _E2M1, _E4M3)
    return None


def _float8_of(one: BlockType) -> np.dtype | None:
    return next((dtype for dtype in (_E4M3, _E5M2) if one.is_held_by(dtype)), None)


def form_of(target: Target, lhs: BlockType, rhs: BlockType, *, is_dot: bool) -> Form:
    """Returns the form for a target.

    Args:
        target: target of the program.
        lhs: type of lhs.
        rhs: type of rhs.
        is_dot: whether the contraction is a `lax.dot_general`.
    """
    if not (target.is_gpu or target.platform == "tpu"):
        return "float32"
    if is_dot and codes_of(lhs, rhs) is not None and _scales_blocks(target):
        return "block-scaled"
    return "bfloat16" if lhs.fits_bfloat16 and rhs.fits_bfloat16 else "by block"


def _scales_blocks(target: Target) -> bool:
    # Partitioned, the operands would be gathered; and an exported program may not
    # contain the custom call, whose format may change.
    is_whole = target.partitions == 1 and not target.is_exported
    return target.platform == "cuda" and is_whole and processor.gpu_scales_blocks()
