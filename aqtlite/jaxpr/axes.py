"""Axis analysis: the axis of an input that an axis of a value is.

Casts, transposes, scans and elementwise arithmetic keep axes or move them; what mixes
axes loses them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import core

from aqtlite.jaxpr import analysis


class Axis(NamedTuple):
    """An axis of an input of a jaxpr."""

    input: int
    axis: int


Axes = tuple[Axis | None, ...]
"""For each axis of a value, the axis of an input that it is, if it is one."""

# These keep the shape of an operand but not the order along its axes.
_REORDERING = frozenset({"rev", "sort", "dot_general", "fft", "cholesky"})


def output_axes(closed: core.ClosedJaxpr) -> list[Axes]:
    """Returns the axes of each output of a jaxpr."""
    inputs = [
        tuple(Axis(i, axis) for axis in range(len(var.aval.shape)))
        for i, var in enumerate(closed.jaxpr.invars)
    ]
    return analysis.analyze(closed.jaxpr, inputs, _AxisAnalysis())


class _AxisAnalysis(analysis.Analysis[Axes]):
    def constant(self, aval: Any) -> Axes:
        return (None,) * len(aval.shape)

    def join(self, first: Axes, second: Axes) -> Axes:
        return tuple(a if a == b else None for a, b in zip(first, second, strict=True))

    def unstack(self, fact: Axes) -> Axes:
        return fact[1:]

    def stack(self, fact: Axes, scanned: Sequence[Axes]) -> Axes:
        leading = {axes[0].input: axes[0] for axes in scanned if axes[0] is not None}
        sources = [axis.input for axis in fact if axis is not None]
        return (leading.get(sources[0]) if sources else None, *fact)

    def equation(self, eqn: Any, inputs: list[Axes]) -> list[Axes]:
        name = eqn.primitive.name
        if name == "transpose":
            return [tuple(inputs[0][axis] for axis in eqn.params["permutation"])]
        if name == "broadcast_in_dim":
            return [_broadcast(eqn, inputs[0])]
        if name in ("reshape", "squeeze"):
            return [_reshape(eqn, inputs[0])]
        if name in ("slice", "dynamic_slice"):
            return [_slice(eqn, inputs[0])]
        return [self._elementwise(eqn, out, inputs) for out in eqn.outvars]

    def _elementwise(self, eqn: Any, out: Any, inputs: list[Axes]) -> Axes:
        result = self.constant(out.aval)
        if eqn.primitive.name in _REORDERING:
            return result
        for atom, axes in zip(eqn.invars, inputs, strict=True):
            if atom.aval.shape == out.aval.shape:
                result = tuple(a or b for a, b in zip(result, axes, strict=True))
        return result


def _broadcast(eqn: Any, axes: Axes) -> Axes:
    operand, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    result: list[Axis | None] = [None] * len(out)
    for axis, out_axis in enumerate(eqn.params["broadcast_dimensions"]):
        if operand[axis] == out[out_axis]:
            result[out_axis] = axes[axis]
    return tuple(result)


def _slice(eqn: Any, axes: Axes) -> Axes:
    """Keeps the axes that are taken whole."""
    operand, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    sizes = zip(axes, operand, out, strict=True)
    return tuple(axis if size == kept else None for axis, size, kept in sizes)


def _reshape(eqn: Any, axes: Axes) -> Axes:
    """Keeps the axes where axes of size one come or go, and nothing else."""
    operand, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    full = [axis for axis, size in enumerate(operand) if size != 1]
    if [operand[axis] for axis in full] != [size for size in out if size != 1]:
        return (None,) * len(out)
    kept = iter(full)
    return tuple(None if size == 1 else axes[next(kept)] for size in out)
