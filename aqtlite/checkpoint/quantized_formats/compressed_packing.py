"""The two ways in which compressed-tensors packs integers in words of 32 bits.

Version 0.18 and later have one stream of bits; before, each word had ``32 // bits``
codes, and the rest of its bits were unused. Zero points are packed as their weight is.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.quantized_formats import base, bits

_FIRST_DENSE = (0, 18)
_VERSION = re.compile(r"(\d{1,9})\.(\d{1,9})")


class Packing(NamedTuple):
    """A way to pack codes."""

    words: Callable[[int, int], int]
    """Returns the number of words for a number of codes, and the bits of each."""

    unpack: bits.Unpack


def _padded_words(count: int, width: int) -> int:
    return base.blocks(count, 32 // width)


DENSE = Packing(bits.words_of, bits.from_words)
PADDED = Packing(_padded_words, bits.from_padded_words)


def is_dense(version: object) -> bool | None:
    """Whether a version of the package packs densely; None if it is no version."""
    found = _VERSION.match(version) if isinstance(version, str) else None
    return None if found is None else tuple(map(int, found.groups())) >= _FIRST_DENSE


def fitting(width: int, counts: Sequence[tuple[int, int]]) -> list[Packing]:
    """The ways to pack that make these numbers of words.

    Args:
        width: bits of a code.
        counts: numbers of codes along an axis, and of the words that they are in.
    """
    return [
        packing
        for packing in (DENSE, PADDED)
        if all(packing.words(count, width) == words for count, words in counts)
    ]


def packing_of(
    name: str, width: int, counts: Sequence[tuple[int, int]], dense: bool | None
) -> Packing:
    """The only way to pack that fits, or that of the version.

    Args:
        name: name of the packed weight.
        width: bits of a code.
        counts: as in `fitting`, where they fit one way or both.
        dense: what the version of the config says; None for no version.

    Raises:
        CheckpointError: if both ways fit, and there is no version.
    """
    found = fitting(width, counts)
    if len(found) == 1:
        return found[0]
    # Where no code crosses the end of a word, both are the same.
    if 32 % width == 0 or all(count <= 32 // width for count, _ in counts):
        return DENSE
    if dense is None:
        count, words = counts[0]
        raise CheckpointError(
            f"{name}: {count} codes of {width} bits are {words} words in both layouts "
            "of compressed-tensors, before 0.18 and since, and the config has no "
            "version: give quantization_config the version of the package that wrote "
            "the file"
        )
    return DENSE if dense else PADDED
