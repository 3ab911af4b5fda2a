"""Verification of an exported file against its program.

Converters and runtimes reorder and fuse operators, so sets are compared: each constant,
scale and zero point in the file is one of the program's, and the file has all known
operands of the program. Arrays are compared by digest, since models may be large.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from aqtlite.edge.deployed import Deployed
from aqtlite.edge.graph import Node
from aqtlite.edge.grid import Quantized

Key = tuple[Any, ...]
"""Hashable identity of a constant: its integers, scales and zero points."""


def digest(integers: Any) -> bytes:
    """A digest of integers that does not depend on dtype and shape."""
    array = np.ascontiguousarray(integers, np.int32)
    return hashlib.sha256(array.reshape(-1).view(np.uint8).data).digest()


def key_of(integers: Any, scale: Any, zero_point: Any, *more: Any) -> Key:
    """The key of a constant.

    Args:
        integers: values of the constant.
        scale: scale, per-tensor or per-channel.
        zero_point: zero point, per-tensor or per-channel.
        *more: further parts of the key.
    """
    scales = np.asarray(scale, np.float32).tobytes()
    return digest(integers), scales, np.asarray(zero_point, np.int64).tobytes(), *more


def known_operands(deployed: Deployed) -> Iterator[tuple[Node, int, Quantized]]:
    """Yields the known operands of a program, each with its operator and position."""
    for node in deployed.program.graph.nodes:
        for position, one in deployed.operands.get(node.outputs[0], {}).items():
            yield node, position, one


def check_constants(
    in_file: Mapping[Key, str],
    in_program: Iterable[tuple[Node, int, Collection[Key], bool]],
) -> None:
    """Compares the integers of weights, biases and other known operands.

    Args:
        in_file: names of the constants in the file, by key.
        in_program: known operands of the program: operator, position, the keys that
            the file may have for the operand, and whether it must have one of them.

    Raises:
        ValueError: if the file lacks a constant, or has one that is not the program's.
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
    """Compares the scales and zero points of activations.

    Args:
        in_file: name, dtype, scale and zero point of each integer array in the file.
        deployed: the program.

    Raises:
        ValueError: if an array's scale and zero point are not among the program's.
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
