"""The types of tensors in GGUF: blocks of bytes, and the integers and scales in them.

Each type's values are ``scale * code``, or ``scale * code + offset`` with a minimum.
Products of an inner and an outer scale are exact in float32: 11 bits of a float16 times
8 at most.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.quantized_formats import base, bits
from aqtlite.numerics import Numerics
from aqtlite.qtensor.qtensor import QTensor


class Blocks(NamedTuple):
    """Decoded blocks: codes (blocks, elements), scales and offsets (blocks, parts)."""

    codes: np.ndarray
    scale: np.ndarray
    offset: np.ndarray | None = None
    grid: Numerics | None = None


class Type(NamedTuple):
    """A type of tensors."""

    name: str
    elements: int
    """Elements of a block."""

    nbytes: int
    """Bytes of a block."""

    decode: Callable[[np.ndarray], Blocks] | None
    """Function of blocks of bytes, uint8, (blocks, nbytes); None for plain numbers."""

    dtype: np.dtype | None = None
    """Dtype of plain numbers, or of the codes: int4 and uint4 where they fit."""

    @property
    def decoded_dtype(self) -> np.dtype:
        """Dtype of plain numbers, and of what blocks stand for."""
        if self.decode is None and self.dtype is not None:
            return self.dtype
        return np.dtype("float32")

    @property
    def text(self) -> str:
        """Description for tables."""
        if self.decode is None:
            return self.name.lower()
        return f"{self.name}, {8 * self.nbytes / self.elements:g} bits"


def decode(
    name: str, kind: Type, data: np.ndarray, shape: tuple[int, ...]
) -> QTensor | np.ndarray:
    """Decodes the bytes of a tensor.

    Raises:
        CheckpointError: if a scale is NaN, infinite, or none of its type.
    """
    if kind.decode is None:
        return data.view(kind.dtype or np.uint8).reshape(shape)
    found = kind.decode(data.reshape(-1, kind.nbytes))
    for part in (found.scale, found.offset):
        if part is not None and not np.isfinite(part).all():
            raise CheckpointError(f"{name} has a scale that is NaN or infinite")
    parts = shape[-1] // kind.elements * found.scale.shape[-1]
    of_scales = (*shape[:-1], parts)
    codes = found.codes if kind.dtype is None else found.codes.astype(kind.dtype)
    return QTensor(
        codes.reshape(shape),
        found.scale.reshape(of_scales),
        np.dtype("float32"),
        offset=None if found.offset is None else found.offset.reshape(of_scales),
        numerics=found.grid,
    )


def halves(bytes_: np.ndarray) -> np.ndarray:
    """Float16 numbers as float32; (blocks, 2 n) bytes to (blocks, n)."""
    return np.ascontiguousarray(bytes_).view("<f2").astype(np.float32)


def fields(bytes_: np.ndarray, width: int, run: int) -> np.ndarray:
    """Splits runs of bytes into fields of some bits, the lowest first.

    Of each `run` bytes, the lowest fields of all come first, then the next ones.
    """
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    blocks, size = bytes_.shape
    runs = bytes_.reshape(blocks, size // run, 1, run)
    codes = (runs >> shifts) & np.uint8(2**width - 1)
    return codes.reshape(blocks, size * 8 // width)


def _high_bits(bytes_: np.ndarray) -> np.ndarray:
    return np.unpackbits(bytes_, axis=-1, bitorder="little")


def _signed(codes: np.ndarray, middle: int) -> np.ndarray:
    return codes.view(np.int8) - np.int8(middle)


def _q4_0(b: np.ndarray) -> Blocks:
    return Blocks(_signed(fields(b[:, 2:], 4, 16), 8), halves(b[:, :2]))


def _q4_1(b: np.ndarray) -> Blocks:
    return Blocks(fields(b[:, 4:], 4, 16), halves(b[:, :2]), halves(b[:, 2:4]))


def _q5_0(b: np.ndarray) -> Blocks:
    codes = fields(b[:, 6:], 4, 16) | (_high_bits(b[:, 2:6]) << 4)
    return Blocks(_signed(codes, 16), halves(b[:, :2]))


def _q5_1(b: np.ndarray) -> Blocks:
    codes = fields(b[:, 8:], 4, 16) | (_high_bits(b[:, 4:8]) << 4)
    return Blocks(codes, halves(b[:, :2]), halves(b[:, 2:4]))


def _q8_0(b: np.ndarray) -> Blocks:
    return Blocks(np.ascontiguousarray(b[:, 2:]).view(np.int8), halves(b[:, :2]))


def _q2_k(b: np.ndarray) -> Blocks:
    scales = b[:, :16]
    scale = halves(b[:, 80:82]) * (scales & 15).astype(np.float32)
    minimum = halves(b[:, 82:84]) * (scales >> 4).astype(np.float32)
    return Blocks(fields(b[:, 16:80], 2, 32), scale, -minimum)


def _q3_k(b: np.ndarray) -> Blocks:
    high, low = b[:, :32], b[:, 32:96]
    codes = fields(low, 2, 32) | (fields(high, 1, 32) << 2)
    inner = fields(b[:, 96:104], 4, 8) | (fields(b[:, 104:108], 2, 4) << 4)
    scale = halves(b[:, 108:110]) * _signed(inner, 32).astype(np.float32)
    return Blocks(_signed(codes, 4), scale)


def _scales_and_minima(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 8 scales and 8 minima, of 6 bits, in 12 bytes; float32."""
    scale, minimum, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    low = [scale & 63, (rest & 15) | ((scale >> 6) << 4)]
    high = [minimum & 63, (rest >> 4) | ((minimum >> 6) << 4)]
    joined = (np.concatenate(parts, axis=-1) for parts in (low, high))
    first, second = (one.astype(np.float32) for one in joined)
    return first, second


def _q4_k(b: np.ndarray) -> Blocks:
    scale, minimum = _scales_and_minima(b[:, 4:16])
    codes = fields(b[:, 16:], 4, 32)
    return Blocks(codes, halves(b[:, :2]) * scale, -(halves(b[:, 2:4]) * minimum))


def _q5_k(b: np.ndarray) -> Blocks:
    scale, minimum = _scales_and_minima(b[:, 4:16])
    codes = fields(b[:, 48:], 4, 32) | (fields(b[:, 16:48], 1, 32) << 4)
    return Blocks(codes, halves(b[:, :2]) * scale, -(halves(b[:, 2:4]) * minimum))


def _q6_k(b: np.ndarray) -> Blocks:
    codes = fields(b[:, :128], 4, 64) | (fields(b[:, 128:192], 2, 32) << 4)
    inner = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32)
    return Blocks(_signed(codes, 32), halves(b[:, 208:210]) * inner)


_IQ4 = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)


def _iq4_nl(b: np.ndarray) -> Blocks:
    return Blocks(_IQ4[fields(b[:, 2:], 4, 16)], halves(b[:, :2]))


def _iq4_xs(b: np.ndarray) -> Blocks:
    high = np.ascontiguousarray(b[:, 2:4]).view("<u2") >> np.arange(0, 16, 2)
    inner = fields(b[:, 4:8], 4, 1) | ((high & 3) << 4).astype(np.uint8)
    scale = halves(b[:, :2]) * _signed(inner, 32).astype(np.float32)
    return Blocks(_IQ4[fields(b[:, 8:], 4, 16)], scale)


_POWERS_OF_3 = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]


def _ternary(packed: np.ndarray, digits: int) -> np.ndarray:
    """Digits of base 3, the first the most significant, of fractions in bytes."""
    shifted = packed[:, None] * _POWERS_OF_3[:digits]
    codes = (shifted.astype(np.uint16) * 3) >> 8
    return codes.reshape(len(packed), digits * packed.shape[1])


def _tq1_0(b: np.ndarray) -> Blocks:
    parts = [(b[:, :32], 5), (b[:, 32:48], 5), (b[:, 48:52], 4)]
    codes = np.concatenate([_ternary(*part) for part in parts], axis=-1)
    return Blocks(codes.astype(np.int8) - np.int8(1), halves(b[:, 52:54]))


def _tq2_0(b: np.ndarray) -> Blocks:
    return Blocks(_signed(fields(b[:, :64], 2, 32), 1), halves(b[:, 64:66]))


def _mxfp4(b: np.ndarray) -> Blocks:
    exponents = b[:, :1].astype(np.int32)
    scale = np.ldexp(np.float32(1), exponents - 127)
    scale = np.where(exponents == 255, np.float32(np.nan), scale)
    codes = bits.e2m1_without_minus_zero(fields(b[:, 1:], 4, 16))
    return Blocks(codes, scale, grid=bits.E2M1)


def _nvfp4(b: np.ndarray) -> Blocks:
    e4m3 = b[:, :4]
    scale = np.where(e4m3 == 127, np.uint8(0), e4m3).view(base.E4M3)
    scale = np.where(e4m3 > 127, np.float32(np.nan), scale.astype(np.float32))
    codes = bits.e2m1_without_minus_zero(fields(b[:, 4:], 4, 8))
    return Blocks(codes, scale, grid=bits.E2M1)


_INT4, _UINT4 = jnp.dtype("int4"), jnp.dtype("uint4")

TYPES = {
    0: Type("F32", 1, 4, None, np.dtype("<f4")),
    1: Type("F16", 1, 2, None, np.dtype("<f2")),
    2: Type("Q4_0", 32, 18, _q4_0, _INT4),
    3: Type("Q4_1", 32, 20, _q4_1, _UINT4),
    6: Type("Q5_0", 32, 22, _q5_0),
    7: Type("Q5_1", 32, 24, _q5_1),
    8: Type("Q8_0", 32, 34, _q8_0),
    10: Type("Q2_K", 256, 84, _q2_k, _UINT4),
    11: Type("Q3_K", 256, 110, _q3_k, _INT4),
    12: Type("Q4_K", 256, 144, _q4_k, _UINT4),
    13: Type("Q5_K", 256, 176, _q5_k),
    14: Type("Q6_K", 256, 210, _q6_k),
    20: Type("IQ4_NL", 32, 18, _iq4_nl),
    23: Type("IQ4_XS", 256, 136, _iq4_xs),
    24: Type("I8", 1, 1, None, np.dtype("int8")),
    25: Type("I16", 1, 2, None, np.dtype("<i2")),
    26: Type("I32", 1, 4, None, np.dtype("<i4")),
    27: Type("I64", 1, 8, None, np.dtype("<i8")),
    28: Type("F64", 1, 8, None, np.dtype("<f8")),
    30: Type("BF16", 1, 2, None, jnp.dtype("bfloat16")),
    34: Type("TQ1_0", 256, 54, _tq1_0, _INT4),
    35: Type("TQ2_0", 256, 66, _tq2_0, _INT4),
    39: Type("MXFP4", 32, 17, _mxfp4),
    40: Type("NVFP4", 64, 36, _nvfp4),
}
"""Types by their numbers in files."""

NOT_READ = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    29: "IQ1_M",
}
"""Types of llama.cpp that need its tables, or occur in no file."""
