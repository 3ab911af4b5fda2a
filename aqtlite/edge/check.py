"""The check of an exported file against the program that it is made of.

Converters and runtimes order operators anew, and make one of some. So what is compared
are sets: every constant of the file is one of the program's, and the known operands of
the program are in the file; every scale and zero point of the file is one of the
program's. Arrays are compared by digests, since a file may hold a large model.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from aqtlite.edge.deployed import Deployed
from aqtlite.edge.graph import Node
from aqtlite.edge.grid import Quantized

Key = tuple[Any, ...]
"""Integers, their scales and their zero points, by what identifies them."""


def digest(integers: Any) -> bytes:
    """A digest of integers, whatever their dtype and shape."""
    array = np.ascontiguousarray(integers, np.int32)
    return hashlib.sha256(array.reshape(-1).view(np.uint8).data).digest()


def key_of(integers: Any, scale: Any, zero_point: Any, *more: Any) -> Key:
    """The key of a constant.

    Args:
        integers: values of the constant.
        scale: scale, or one for each channel.
        zero_point: zero point, or one for each channel.
        *more: what else identifies the constant.
    """
    scales = np.asarray(scale, np.float32).tobytes()
    return digest(integers), scales, np.asarray(zero_point, np.int64).tobytes(), *more


def known_operands(deployed: Deployed) -> Iterator[tuple[Node, int, Quantized]]:
    """The known operands of a program, each with its operator and position."""
    for node in deployed.program.graph.nodes:
        for position, one in deployed.operands.get(node.outputs[0], {}).items():
            yield node, position, one


def check_constants(
    in_file: Mapping[Key, str],
    in_program: Iterable[tuple[Node, int, Collection[Key], bool]],
) -> None:
    """Compares the integers of weights, biases and other known operands.

    Args:
        in_file: names of the constants of the file, by key.
        in_program: known operands of the program: the operator and the position, the
            keys that a file may have for them, and whether it has to have one.

    Raises:
        ValueError: if the file lacks one, or holds another one.
    """
    known: set[Key] = set()
    for node, position, keys, is_needed in in_program:
        known.update(keys)
        if is_needed and in_file.keys().isdisjoint(keys):
            raise ValueError(
                f"the integers of operand {position} of {node.place} "
                f"({node.operator.name}) are not in the file"
            )
    for key, name in in_file.items():
        if key not in known:
            raise ValueError(
                f"the constant {name!r} of the file is none of the program's"
            )


def check_grids(
    in_file: Iterable[tuple[str, str, np.ndarray, int]], deployed: Deployed
) -> None:
    """Compares the scales and zero points of what is computed.

    Args:
        in_file: name, dtype, scale and zero point of each array of integers.
        deployed: the program.

    Raises:
        ValueError: if the program has no such scale and zero point.
    """
    in_program = {
        (grid.dtype, np.float32(grid.scale).tobytes(), int(grid.zero_point))
        for grid in deployed.grids.values()
    }
    for name, dtype, scale, zero_point in in_file:
        if (dtype, scale.tobytes(), zero_point) not in in_program:
            raise ValueError(
                f"{name!r} of the file is {dtype} with scale {scale} and zero point "
                f"{zero_point}, as nothing in the program has"
            )
