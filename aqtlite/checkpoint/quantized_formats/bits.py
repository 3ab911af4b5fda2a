"""Codes of few bits in bytes and words, and back."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from aqtlite.numerics import Float
from aqtlite.qtensor import float_codes

E2M1 = Float.from_dtype("float4_e2m1fn")

Unpack = Callable[[np.ndarray, int, int], np.ndarray]
"""Function of words, the width of a code, and the number of codes."""


def e2m1(nibbles: np.ndarray) -> np.ndarray:
    """Returns nibbles as stored values of `E2M1`, int4 (`float_codes`)."""
    signed = nibbles.astype(np.int8) - np.int8(16) * (nibbles >= 8)
    return signed.astype(jnp.dtype("int4"))


def e2m1_without_minus_zero(nibbles: np.ndarray) -> np.ndarray:
    """Like `e2m1`, with zero for minus zero, as some decoders do."""
    return e2m1(np.where(nibbles == 8, np.uint8(0), nibbles))


def e2m1_nibbles(values: np.ndarray) -> np.ndarray:
    """Returns values of `E2M1` in its storage dtype as nibbles, uint8."""
    return np.asarray(float_codes.encode(jnp.asarray(values), E2M1)).astype(np.uint8)


def nibbles(packed: np.ndarray) -> np.ndarray:
    """Splits bytes along the last axis in two, the low nibble first."""
    return _split(packed, 4)


def _split(packed: np.ndarray, bits: int) -> np.ndarray:
    """Splits bytes along the last axis in codes of 1, 2, 4 or 8 bits, lowest first."""
    each = 8 // bits
    codes = np.empty((*packed.shape, each), np.uint8)
    for i in range(each):
        codes[..., i] = (packed >> np.uint8(bits * i)) & np.uint8(2**bits - 1)
    return codes.reshape(*packed.shape[:-1], each * packed.shape[-1])


def packed_nibbles(codes: np.ndarray) -> np.ndarray:
    """Joins codes of 4 bits along the last axis, the low nibble first."""
    return (codes[..., ::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def words_of(count: int, bits: int) -> int:
    """The number of words of 32 bits that a dense stream of codes takes."""
    return -(-count * bits // 32)


def from_words(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Unpacks a dense stream of bits along the last axis, lowest bit first.

    Args:
        words: int32, (..., ``words_of(count, bits)``).
        bits: width of a code, 1 to 8.
        count: number of codes.

    Returns:
        uint8, (..., `count`).
    """
    stream = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits in (1, 2, 4, 8):
        return _split(stream, bits)[..., :count]
    # As many bytes as a code has bits hold 8 codes.
    groups = -(-count // 8)
    missing = groups * bits - stream.shape[-1]
    if missing > 0:
        rest = [(0, 0)] * (stream.ndim - 1) + [(0, missing)]
        stream = np.pad(stream, rest)
    grouped = stream[..., : groups * bits].reshape(*stream.shape[:-1], groups, bits)
    joined = np.zeros(grouped.shape[:-1], np.uint64)
    for i in range(bits):
        joined |= grouped[..., i].astype(np.uint64) << np.uint64(8 * i)
    codes = np.empty((*joined.shape, 8), np.uint8)
    mask = np.uint64(2**bits - 1)
    for i in range(8):
        codes[..., i] = (joined >> np.uint64(bits * i)) & mask
    return codes.reshape(*stream.shape[:-1], groups * 8)[..., :count]


def from_padded_words(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Unpacks words that hold ``32 // bits`` codes each, with the rest unused."""
    shifts = (bits * np.arange(32 // bits)).astype(np.uint32)
    codes = (words.view(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    shape = *words.shape[:-1], words.shape[-1] * (32 // bits)
    return codes.reshape(shape)[..., :count].astype(np.uint8)


def to_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs uint8 codes along the last axis, as `from_words` unpacks them; int32."""
    *leading, count = codes.shape
    groups = -(-count // 8)
    rest = [(0, 0)] * len(leading) + [(0, groups * 8 - count)]
    grouped = np.pad(codes, rest).reshape(*leading, groups, 8)
    joined = np.zeros(grouped.shape[:-1], np.uint64)
    for i in range(8):
        joined |= grouped[..., i].astype(np.uint64) << np.uint64(bits * i)
    packed = np.zeros((*leading, 4 * words_of(groups * 8, bits)), np.uint8)
    for i in range(bits):
        packed[..., i : groups * bits : bits] = joined >> np.uint64(8 * i)
    words = packed.view("<i4").astype(np.int32, copy=False)
    return np.ascontiguousarray(words[..., : words_of(count, bits)])
