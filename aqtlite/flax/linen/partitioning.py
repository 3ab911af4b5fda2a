"""Partitioning metadata of frozen weights, carried over from their parameters."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import linen as nn

from aqtlite.program.serving.frozen_record import FrozenEntry
from aqtlite.program.serving.model import Buffer, Parameter, ParameterAxis
from aqtlite.program.serving.weight import Weight
from aqtlite.qtensor.packed_values import PackedValues
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.shapes.sharding import names_of_blocks

Boxes = dict[Parameter | Buffer, Any]
"""The `flax.linen.meta.AxisMetadata` around each boxed parameter."""


def boxes_of(params: Any, parameters: tuple[Parameter, ...]) -> Boxes:
    """Returns the boxes around the parameters.

    Args:
        params: the tree of parameters.
        parameters: leaves of the tree.
    """
    nodes = jax.tree.leaves(params, is_leaf=nn.meta.is_axis_metadata)
    of_leaf = [node for node in nodes for _ in jax.tree.leaves(node)]
    return {
        parameter: node
        for parameter, node in zip(parameters, of_leaf, strict=True)
        if nn.meta.is_axis_metadata(node)
    }


def boxed(weight: Weight, stored: FrozenEntry, boxes: Boxes) -> FrozenEntry:
    """Returns a frozen weight, boxed like its parameters.

    One that is packed has no axes to name.

    Args:
        weight: the weight.
        stored: what of it is stored.
        boxes: boxes of the parameters.
    """
    side = stored.record.operand.side
    q = stored.values[side]
    is_packed = isinstance(q.qvalue, PackedValues)
    box = None if is_packed else box_of(weight.axes(), boxes)
    if box is None:
        return stored
    qtensor = _box_qtensor(q, box)
    return stored._replace(values={**stored.values, side: qtensor})


def box_of(axes: Sequence[ParameterAxis | None], boxes: Boxes) -> Any:
    """Returns a box with the names of the axes; None if no axis has a name."""
    template = None
    names: list[Any] = []
    for axis in axes:
        name = None
        if axis is not None:
            source = boxes.get(axis.parameter)
            declared = getattr(source, "names", ())
            name = declared[axis.axis] if axis.axis < len(declared) else None
            template = template if name is None else source
        names.append(name)
    return None if template is None else template.replace(names=tuple(names))


def _box_qtensor(qtensor: QTensor, box: Any) -> QTensor:
    """Boxes the arrays of a `QTensor`; of scales and the like, by `names_of_blocks`."""

    def boxed(x: Any) -> Any:
        if x is None:
            return None
        names = names_of_blocks(box.names, qtensor.qvalue.shape, x)
        return dataclasses.replace(box, names=tuple(names)).replace_boxed(x)

    return dataclasses.replace(
        qtensor,
        qvalue=box.replace_boxed(qtensor.qvalue),
        scale=jax.tree.map(boxed, qtensor.scale),  # Of several arrays: double scales.
        zero_point=boxed(qtensor.zero_point),
        sums=boxed(qtensor.sums),
    )
