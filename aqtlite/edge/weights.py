"""Frozen weights of a program in the forms that files have."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from aqtlite import calibration, config, numerics
from aqtlite.edge.graph import Graph, Node
from aqtlite.edge.grid import Grid, Quantized
from aqtlite.edge.operators.base import is_transposed_convolution
from aqtlite.edge.operators.contractions import BatchMatMul, Weighted
from aqtlite.edge.operators.layout import Reshape, Transpose
from aqtlite.edge.operators.weights import QuantizedOperand
from aqtlite.qtensor import stored_values
from aqtlite.qtensor.qtensor import QTensor


@dataclasses.dataclass(frozen=True, eq=False)
class FrozenWeight:
    """A frozen weight as an operator takes it."""

    quantized: Quantized
    is_dynamic: bool
    """Whether the other operand is quantized, too, by its own range at each call."""


def has_weight(node: Node) -> bool:
    """Whether an operator can take a frozen weight as its second input."""
    is_contraction = isinstance(node.operator, Weighted | BatchMatMul)
    return is_contraction or is_transposed_convolution(node.operator)


def values_of(graph: Graph) -> frozenset[int]:
    """The values that are frozen weights, by number."""
    return frozenset(value for node in _made(graph) for value in node.outputs)


def _made(graph: Graph) -> Iterator[Node]:
    """The nodes that give frozen weights, or lay them out."""
    found: set[int] = set()
    for node in graph.nodes:
        is_moved = isinstance(node.operator, Reshape | Transpose)
        if isinstance(node.operator, QuantizedOperand) or (
            is_moved and found.issuperset(node.inputs)
        ):
            found.update(node.outputs)
            yield node


def frozen(graph: Graph, known: Mapping[int, Any]) -> dict[int, FrozenWeight]:
    """Returns the frozen weights of a program, by number.

    Args:
        graph: the program.
        known: values that depend only on parameters and constants, by number.

    Raises:
        ValueError: if a weight has no form in a file.
    """
    tensors: dict[int, tuple[QTensor, Node]] = {}
    for node in _made(graph):
        operator = node.operator
        if isinstance(operator, QuantizedOperand):
            q = operator.qtensor(*(known[i] for i in node.inputs))
            tensors[node.output] = q, node
        else:
            q, source = tensors[node.inputs[0]]
            tensors[node.output] = operator.compute(q), source
    taken = dict.fromkeys(
        node.inputs[1]
        for node in graph.nodes
        if has_weight(node) and node.inputs[1] in tensors
    )
    return {value: _frozen(*tensors[value]) for value in taken}


def _frozen(q: QTensor, source: Node) -> FrozenWeight:
    operator = source.operator
    assert isinstance(operator, QuantizedOperand)
    return FrozenWeight(of_qtensor(q, source.place), _is_dynamic(source, operator))


_WHOLE = (
    calibration.AbsMax(),
    calibration.AbsMax(clipping_scale=1.0),
    calibration.MinMax(),
)
"""Calibrations of activations that clip nothing, like the runtimes."""


def _is_dynamic(source: Node, operator: QuantizedOperand) -> bool:
    other: config.Tensor = operator.other
    if not other.is_quantized:
        return False
    side = "lhs" if operator.side == "rhs" else "rhs"
    where = f"{source.place}: fwd.{side}"
    if other.calibration.has_state:
        raise ValueError(
            f"{where} has static ranges of {other.calibration!r}: give edge.export "
            "ranges of the float model, from edge.calibrate; without them, activations "
            "are float, or quantized by their own range at each call"
        )
    if not (other.is_integer and _has_8_bits(other.grid)):
        raise ValueError(
            f"{where} has {other.numerics!r}, and runtimes quantize activations to 8 "
            f"bits: set fwd.{side}.numerics to numerics.IntSymmetric(bits=8), as in "
            "config.w4a8() for weights of 4 bits, or leave activations in float, as in "
            "config.weight_only(bits)"
        )
    if other.calibration not in _WHOLE:
        raise ValueError(
            f"{where} has ranges of {other.calibration!r}, and runtimes quantize "
            "activations by the smallest and largest value of each call, without "
            "clipping: take calibration.AbsMax(), leave activations in float, as in "
            "config.weight_only(bits), or give edge.export ranges of the float model, "
            "from edge.calibrate, whose calibration may clip"
        )
    return True


def _has_8_bits(grid: numerics.Numerics) -> bool:
    return (
        isinstance(grid, numerics.IntSymmetric | numerics.IntAffine) and grid.bits == 8
    )


def of_qtensor(q: QTensor, place: str) -> Quantized:
    """Returns the integers and the grid of a frozen weight.

    Args:
        q: the weight.
        place: name scopes around the contraction, for messages.

    Raises:
        ValueError: if the scales vary in another way than along one axis, or in blocks
            of one axis.
    """
    plain = q.in_own_order()
    values = np.asarray(stored_values.on_grid(plain.qvalue, plain.numerics))
    scale = np.asarray(plain.scale, np.float32)
    zero_point = np.zeros(scale.shape, np.int32)
    if plain.zero_point is not None:
        zero_point = np.asarray(plain.zero_point, np.int32)
    dtype = values.dtype.name
    if dtype == "uint8":
        values, zero_point, dtype = (
            values.astype(np.int16) - 128,
            zero_point - 128,
            "int8",
        )
    if q.padding is not None or dtype not in ("int2", "int4", "uint4", "int8"):
        raise ValueError(
            f"{place}: a weight of {dtype} {q.shape} with padding {q.padding} has no "
            "form in a file, which takes up to 8 bits, and blocks that divide an axis "
            "(config.Blocks(fit=True))"
        )
    axis, block, scale, zero_point = _granularity(
        values.shape, scale, zero_point, place
    )
    return Quantized(
        values.astype(np.int8), Grid(scale, _number(zero_point), dtype, axis, block)
    )


def _granularity(
    shape: tuple[int, ...], scale: np.ndarray, zero_point: np.ndarray, place: str
) -> tuple[int | None, int | None, np.ndarray, np.ndarray]:
    """Axis and block of a grid, and its scales and zero points."""
    sizes = [n // s for n, s in zip(shape, scale.shape, strict=True)]
    whole = [axis for axis, s in enumerate(scale.shape) if s == 1]
    varying = [axis for axis, s in enumerate(scale.shape) if s > 1]
    blocked = [axis for axis in varying if sizes[axis] > 1]
    if not varying:
        return None, None, scale.reshape(()), zero_point.reshape(())
    if len(varying) == 1 and not blocked:
        return varying[0], None, scale.reshape(-1), zero_point.reshape(-1)
    if len(blocked) > 1:
        raise ValueError(
            f"{place}: a weight of {shape} has blocks along {len(blocked)} axes, and "
            "files have blocks along one: set fwd.rhs.blocks.size alone"
        )
    axis = blocked[0] if blocked else next(i for i in whole if shape[i] > 1)
    full = tuple(
        s if i == axis else n
        for i, (n, s) in enumerate(zip(shape, scale.shape, strict=True))
    )
    return (
        axis,
        sizes[axis],
        np.broadcast_to(scale, full).copy(),
        np.broadcast_to(zero_point, full).copy(),
    )


def _number(zero_point: np.ndarray) -> Any:
    """Zero points, as an int if all are zero."""
    return zero_point if zero_point.any() else 0
