"""Carries partitioning metadata from parameters to what was frozen of them.

The names of a kernel's axes (`nn.Partitioned` and the like) are followed through the
program that made the frozen integers: casts, transposes, scans and elementwise
arithmetic keep them or move them; what mixes axes loses them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import linen as nn
from jax.extend import core

from aqtlite.flax import program
from aqtlite.qtensor import QTensor

# For each axis of an array: the input and the axis of it that it is, if it is one.
_Origins = tuple[tuple[int, int] | None, ...]

# These keep the shape of an operand but not the order along its axes.
_REORDERING = frozenset({"rev", "sort", "dot_general", "fft", "cholesky"})


def boxes(cut: core.ClosedJaxpr, kept: Sequence[int], params: Any) -> list[Any]:
    """For each output of a program, a box like that of the parameter it was made of.

    Args:
        cut: the program; its inputs are leaves of `params`.
        kept: for each input of the program, the index of its leaf in `params`.
        params: the parameters, boxed in `flax.linen.meta.AxisMetadata` or not.

    Returns:
        The parameter's box with the names of the output's axes, None for an axis that
        has none; and None for an output without a named axis.
    """
    box_of_leaf: list[Any] = []
    for node in jax.tree.leaves(params, is_leaf=nn.meta.is_axis_metadata):
        box_of_leaf.extend([node] * len(jax.tree.leaves(node)))
    inputs: list[_Origins] = [
        tuple((i, axis) for axis in range(len(var.aval.shape)))
        for i, var in enumerate(cut.jaxpr.invars)
    ]

    def box(origins: _Origins) -> Any:
        template = None
        names: list[Any] = []
        for origin in origins:
            name = None
            if origin is not None:
                source = box_of_leaf[kept[origin[0]]]
                declared = getattr(source, "names", ())
                name = declared[origin[1]] if origin[1] < len(declared) else None
                template = template if name is None else source
            names.append(name)
        return None if template is None else template.replace(names=tuple(names))

    return [box(origins) for origins in _walk(cut.jaxpr, inputs)]


def box_qtensor(qtensor: QTensor, box: Any) -> QTensor:
    """Puts a box around integers, and one around their scale.

    An axis that shares a scale has size one there, and no name.
    """
    if box is None:
        return qtensor
    sizes = zip(qtensor.qvalue.shape, qtensor.scale.shape, strict=True)
    scale_names = tuple(
        name if size == scale_size else None
        for name, (size, scale_size) in zip(box.names, sizes, strict=True)
    )
    scale_box = dataclasses.replace(box, names=scale_names)
    return dataclasses.replace(
        qtensor,
        qvalue=box.replace_boxed(qtensor.qvalue),
        scale=scale_box.replace_boxed(qtensor.scale),
    )


def _walk(jaxpr: Any, inputs: Sequence[_Origins]) -> list[_Origins]:
    known = {var: _unknown(var) for var in jaxpr.constvars}
    known.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> _Origins:
        return _unknown(atom) if isinstance(atom, core.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        outputs = _equation(eqn, [read(atom) for atom in eqn.invars])
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _unknown(atom: Any) -> _Origins:
    return (None,) * len(atom.aval.shape)


def _equation(eqn: Any, inputs: list[_Origins]) -> list[_Origins]:
    name = eqn.primitive.name
    if name == "scan":
        return _scan(eqn, inputs)
    body = program.called_body(eqn)
    if body is not None:
        return _walk(body.jaxpr, inputs)
    if name == "transpose":
        return [tuple(inputs[0][axis] for axis in eqn.params["permutation"])]
    if name == "broadcast_in_dim":
        return [_broadcast(eqn, inputs[0])]
    if name in ("reshape", "squeeze"):
        return [_reshape(eqn, inputs[0])]
    if name in ("slice", "dynamic_slice"):
        return [_slice(eqn, inputs[0])]
    return [_elementwise(eqn, out, inputs) for out in eqn.outvars]


def _scan(eqn: Any, inputs: list[_Origins]) -> list[_Origins]:
    """Slices lose their leading axis in the body, and what is stacked regains it."""
    body = eqn.params["jaxpr"].jaxpr
    num_consts, num_carry = eqn.params["num_consts"], eqn.params["num_carry"]
    consts, scanned = inputs[:num_consts], inputs[num_consts + num_carry :]
    carry = [_unknown(var) for var in body.invars[num_consts : num_consts + num_carry]]
    outputs = _walk(body, [*consts, *carry, *(origins[1:] for origins in scanned)])
    leading = {
        origins[0][0]: origins[0] for origins in scanned if origins[0] is not None
    }
    result = [_unknown(var) for var in eqn.outvars[:num_carry]]
    for origins in outputs[num_carry:]:
        sources = [origin[0] for origin in origins if origin is not None]
        result.append((leading.get(sources[0]) if sources else None, *origins))
    return result


def _broadcast(eqn: Any, origins: _Origins) -> _Origins:
    operand, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    result: list[Any] = [None] * len(out)
    for axis, out_axis in enumerate(eqn.params["broadcast_dimensions"]):
        if operand[axis] == out[out_axis]:
            result[out_axis] = origins[axis]
    return tuple(result)


def _slice(eqn: Any, origins: _Origins) -> _Origins:
    """Keeps the names of the axes that are taken whole."""
    operand, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    sizes = zip(origins, operand, out, strict=True)
    return tuple(origin if size == kept else None for origin, size, kept in sizes)


def _reshape(eqn: Any, origins: _Origins) -> _Origins:
    """Keeps the names where axes of size one come or go, and nothing else."""
    operand, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    full = [axis for axis, size in enumerate(operand) if size != 1]
    if [operand[axis] for axis in full] != [size for size in out if size != 1]:
        return _unknown(eqn.outvars[0])
    kept = iter(full)
    return tuple(None if size == 1 else origins[next(kept)] for size in out)


def _elementwise(eqn: Any, out: Any, inputs: list[_Origins]) -> _Origins:
    shape = out.aval.shape
    result = _unknown(out)
    if eqn.primitive.name in _REORDERING:
        return result
    for atom, origins in zip(eqn.invars, inputs, strict=True):
        if atom.aval.shape == shape:
            result = tuple(a or b for a, b in zip(result, origins, strict=True))
    return result
