"""Rows of int4 or int8 weights laid out in panels, as their kernel reads them.

A panel has `PANEL` rows, of which it holds 32 bits each by turns: eight int4 that are
multiplied by the same eight values, or four int8. Weights are raised, to be unsigned.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering.forms import custom_call, pairs

PANEL = 16
"""Number of rows of weights in a panel."""

WORD = 4
"""Bytes of a row that lie together."""

SIGN = 8
"""The sign of an int4, or of a code of four bits, which is flipped in panels."""

SIGNS = {4: 0x11111111 * SIGN, 8: 0x80808080}
"""The bits of a word that raise weights of 4 or 8 bits, once they are flipped."""

_HALVES, _HALF = 0x0F0F0F0F, 4  # The lower half of each byte of a word, and its bits.

_QUAD = 4
"""Number of words of a row that are read at a time."""


class Panels(NamedTuple):
    """A matrix of weights in panels."""

    values: jax.Array
    """uint8, from `of_weights`."""

    columns: int
    """Number of rows of the matrix, which are columns of a result."""

    bits: int
    """Bits of a weight: 4 or 8."""

    @property
    def products(self) -> int:
        """The number of weights of a row."""
        return self.values.shape[1] * 8 // (PANEL * self.bits)

    def integers(self) -> jax.Array:
        """Returns the matrix, int8."""
        words = lax.bitwise_xor(self.values, np.uint8(SIGNS[self.bits] & 0xFF))
        words = words.reshape(len(words), -1, PANEL, WORD)
        size = words.shape[1] * WORD
        rows = jnp.moveaxis(words, 2, 1).reshape(-1, size)
        rest = self.columns % PANEL
        if rest:  # The last panel repeats rows of the one before it.
            rows = jnp.concatenate([rows[: self.columns - rest], rows[-rest:]])
        signed = lax.bitcast_convert_type(rows, jnp.int8)
        return signed if self.bits == 8 else pairs.values_of(signed)


def of_weights(weights: jax.Array) -> jax.Array:
    """Returns weights in panels.

    The last panel ends with the last row, and may share rows with the one before it.

    Args:
        weights: int4, also as bytes, ``(rows, products / 2)``, or int8; at least
            `PANEL` rows of whole words.

    Returns:
        uint8, ``(panels, bytes)``.
    """
    bits = 8 if weights.dtype == jnp.int8 else 4
    if weights.dtype == jnp.int4:
        weights = pairs.as_bytes(weights)
    weights = lax.bitcast_convert_type(weights, jnp.uint8)
    size = weights.shape[1]
    words = _in_panels(weights.reshape(-1, size // WORD, WORD))
    return lax.bitwise_xor(
        words.reshape(-1, PANEL * size), np.uint8(SIGNS[bits] & 0xFF)
    )


def check(weights: jax.Array, columns: int, products: int, bits: int) -> None:
    """Raises ValueError for panels of another matrix, behind which a kernel would read.

    Args:
        weights: the panels.
        columns: number of rows of the matrix.
        products: number of weights of a row.
        bits: bits of a weight.
    """
    wanted = -(-columns // PANEL), PANEL * products * bits // 8
    if weights.shape != wanted:
        raise ValueError(
            f"panels of {columns} rows of {products} weights of {bits} bits have the "
            f"shape {wanted}, got {weights.shape}"
        )


def of_scales(scales: jax.Array) -> jax.Array:
    """Returns float32 ``(rows, tiles)`` in panels, ``(panels, tiles, PANEL)``."""
    return _in_panels(scales)


def _in_panels(x: jax.Array) -> jax.Array:
    rows = x.shape[0]
    whole = rows - rows % PANEL
    if rows != whole:
        x = jnp.concatenate([x[:whole], x[rows - PANEL :]])
    return jnp.moveaxis(x.reshape(-1, PANEL, *x.shape[1:]), 1, 2)


def lay_out(
    f: custom_call.Function, rows: Any, words: Any, panel: Any, flipped: int = 0
) -> None:
    """Writes the instructions that lay out a panel of words.

    Args:
        f: function that is being written.
        rows: pointer to `PANEL` rows, one behind another.
        words: number of words of a row, at least one.
        panel: pointer to where the panel goes.
        flipped: bits to flip in each word.
    """
    at, size = f.at, f.times(words, WORD)
    whole = at.and_(words, f.long(-_QUAD))
    for half in range(2):
        with f.if_any(0, whole), f.loop(0, whole, _QUAD) as word:
            _four_words(f, rows, size, word, panel, half, flipped)
    with f.if_any(whole, words), f.loop(whole, words) as word:
        for row in range(PANEL):
            place = f.sum(f.times(size, row), f.times(word, WORD))
            value = at.xor(f.load(rows, place, f.int), f.int(flipped))
            f.store(value, panel, f.times(f.sum(f.times(word, PANEL), row), WORD))


def lay_out_columns(
    f: custom_call.Function, weights: Any, columns: Any, words: Any, panel: Any
) -> None:
    """Writes the instructions that lay out a panel of int8, ``(products, columns)``.

    Args:
        f: function that is being written.
        weights: pointer to the first of `PANEL` columns.
        columns: number of all columns.
        words: number of words of a column, at least one.
        panel: pointer to where the panel goes.
    """
    with f.loop(0, words) as word:
        lay_out_word_of_bytes(f, weights, columns, word, panel, SIGNS[8])


def lay_out_word_of_bytes(
    f: custom_call.Function,
    weights: Any,
    columns: Any,
    word: Any,
    panel: Any,
    flipped: int,
) -> None:
    """Writes the instructions that lay out a word of `lay_out_columns`.

    Args:
        f: function that is being written.
        weights: as in `lay_out_columns`.
        columns: as in `lay_out_columns`.
        word: index of the word.
        panel: as in `lay_out_columns`.
        flipped: bits to flip in each word, alike in its bytes.
    """
    at, kind = f.at, f.ir.VectorType(f.byte, PANEL)
    start = f.offset(weights, f.times(word, columns, WORD))
    rows = [f.load(start, f.times(columns, i), kind) for i in range(WORD)]
    for half in range(2):
        of_half = range(half * PANEL // 2, (half + 1) * PANEL // 2)
        by_turns = [i + row for i in of_half for row in (0, PANEL)]
        first, second = (f.shuffled(rows[i], by_turns, rows[i + 1]) for i in (0, 2))
        places = 0, 1, PANEL, PANEL + 1
        order = [i + place for i in range(0, PANEL, 2) for place in places]
        four = f.shuffled(first, order, second)
        raised = at.xor(four, f.constant(four.type, flipped & 0xFF))
        place = f.times(word, PANEL * WORD)
        f.store(raised, panel, f.sum(place, half * PANEL * WORD // 2))


def lay_out_word_of_pairs(
    f: custom_call.Function, pairs: Any, columns: Any, word: Any, panel: Any
) -> None:
    """Writes the instructions that lay out a word of int4, ``(products, columns)``.

    Args:
        f: function that is being written.
        pairs: pointer to the first of `PANEL` columns, of which two are in a byte.
        columns: number of all columns, even.
        word: index of the word.
        panel: pointer to where the panel goes.
    """
    at, of_word = f.at, 2 * WORD
    bytes_of_row = f.ir.VectorType(f.byte, PANEL // 2)
    ints = f.ir.VectorType(f.int, PANEL)
    twice = [place // 2 for place in range(PANEL)]
    halves = f.ir.Constant(ints, [0, _HALF] * (PANEL // 2))
    row_size = at.sdiv(columns, f.long(2))
    start = f.offset(pairs, f.times(word, row_size, of_word))
    laid_out = f.constant(ints, SIGNS[4])
    for i in range(of_word):
        row = f.load(start, f.times(row_size, i), bytes_of_row)
        both = at.zext(f.shuffled(row, twice, row), ints)
        one = at.and_(at.lshr(both, halves), f.constant(ints, 0xF))
        moved = at.shl(one, f.constant(ints, 4 * i)) if i else one
        laid_out = at.xor(laid_out, moved)
    f.store(laid_out, panel, f.times(word, PANEL * WORD))


def widen(
    f: custom_call.Function,
    panel: Any,
    words: Any,
    wide: Any,
    halves: Callable[[custom_call.Function, Any], tuple[Any, Any]],
) -> None:
    """Writes the instructions that store weights of a panel in twice their bits.

    Args:
        f: function that is being written.
        panel: pointer to a panel.
        words: number of words of a row, at least one.
        wide: pointer to where weights go, by turns both halves of a word of each row.
        halves: `nibbles` of int4, `bytes_as_int16` of int8.
    """
    size = PANEL * WORD // 2
    ints = f.ir.VectorType(f.int, size // 4)
    with f.loop(0, words) as word:
        start, there = (f.times(word, n * 2 * size) for n in (1, 2))
        for i in (0, size):
            first, second = halves(f, f.load(panel, f.sum(start, i), ints))
            f.store(first, wide, f.sum(there, i))
            f.store(second, wide, f.sum(there, 2 * size + i))


def nibbles(f: custom_call.Function, x: Any) -> tuple[Any, Any]:
    """The lower and the upper halves of the bytes of a vector of int32, as bytes."""
    halves, half = (f.constant(x.type, value) for value in (_HALVES, _HALF))
    upper = f.at.lshr(x, half)
    return f.at.and_(x, halves), f.at.and_(upper, halves)


def bytes_as_int16(f: custom_call.Function, x: Any) -> tuple[Any, Any]:
    """The even and the odd bytes of a vector of int32, raised int8, as int16."""
    shorts = f.ir.VectorType(f.ir.IntType(16), 2 * x.type.count)
    x = f.at.xor(f.at.bitcast(x, shorts), f.constant(shorts, SIGNS[8] & 0xFFFF))
    eight = f.constant(shorts, 8)
    return f.at.ashr(f.at.shl(x, eight), eight), f.at.ashr(x, eight)


def _four_words(
    f: custom_call.Function,
    rows: Any,
    size: Any,
    word: Any,
    panel: Any,
    half: int,
    flipped: int,
) -> None:
    """Lays out four words of each row of half a panel."""
    eight = f.ir.VectorType(f.int, 2 * _QUAD)
    where = f.offset(rows, f.sum(f.times(size, 2 * _QUAD * half), f.times(word, WORD)))
    quads = [
        f.load(where, f.times(size, i), f.ir.VectorType(f.int, 4))
        for i in range(2 * _QUAD)
    ]
    # Rows i and i + 4 in one vector, then transposed within both halves.
    both = [
        f.shuffled(quads[i], list(range(8)), quads[i + _QUAD]) for i in range(_QUAD)
    ]
    low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
    a, b = (f.shuffled(both[0], order, both[1]) for order in (low, high))
    c, d = (f.shuffled(both[2], order, both[3]) for order in (low, high))
    first, second = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
    columns = [
        f.shuffled(one, order, other)
        for one, other in ((a, c), (b, d))
        for order in (first, second)
    ]
    for i, column in enumerate(columns):
        place = f.times(f.sum(word, i), PANEL * WORD)
        raised = f.at.xor(column, f.constant(eight, flipped))
        f.store(raised, panel, f.sum(place, 2 * _QUAD * WORD * half))
