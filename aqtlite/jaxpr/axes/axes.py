"""Axis analysis: the input axis that each axis of a value comes from.

Casts, transposes, scans and elementwise arithmetic keep or move axes; operations that
mix axes lose them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import core

from aqtlite.jaxpr import analysis
from aqtlite.jaxpr.axes import reshapes


class Axis(NamedTuple):
    """An axis of an input of a jaxpr."""

    input: int
    axis: int


Axes = tuple[Axis | None, ...]
"""For each axis of a value, the input axis that it comes from, or None."""


class _Piece(NamedTuple):
    """An axis that a reshape split off another axis."""

    whole: Axis
    sizes: tuple[int, ...]
    """Sizes of all pieces."""

    number: int
    """Index among the pieces."""

    @property
    def input(self) -> int:
        """Index of the input with the whole axis."""
        return self.whole.input


_Fact = tuple[Axis | _Piece | None, ...]
"""`Axes` that may include pieces of axes."""

# These keep the shape of an operand but not the order along its axes.
_REORDERING = frozenset({"rev", "sort", "dot_general", "fft", "cholesky"})


def output_axes(closed: core.ClosedJaxpr) -> list[Axes]:
    """Returns the axes of each output of a jaxpr.

    An axis that one reshape splits, for example into blocks, and another joins again
    is kept.
    """
    avals: list[Any] = list(closed.in_avals)
    inputs = [
        tuple(Axis(i, axis) for axis in range(len(aval.shape)))
        for i, aval in enumerate(avals)
    ]
    found = analysis.analyze(closed.jaxpr, inputs, _AxisAnalysis())
    return [
        tuple(axis if isinstance(axis, Axis) else None for axis in axes)
        for axes in found
    ]


class _AxisAnalysis(analysis.Analysis[_Fact]):
    def constant(self, atom: Any) -> _Fact:
        return (None,) * len(atom.aval.shape)

    def join(self, first: _Fact, second: _Fact) -> _Fact:
        return tuple(a if a == b else None for a, b in zip(first, second, strict=True))

    def unstack(self, fact: _Fact) -> _Fact:
        return fact[1:]

    def stack(self, fact: _Fact, scanned: Sequence[_Fact]) -> _Fact:
        leading = {axes[0].input: axes[0] for axes in scanned if axes[0] is not None}
        sources = [axis.input for axis in fact if axis is not None]
        return (leading.get(sources[0]) if sources else None, *fact)

    def equation(self, eqn: Any, inputs: list[_Fact]) -> list[_Fact]:
        name = eqn.primitive.name
        if name == "transpose":
            return [tuple(inputs[0][axis] for axis in eqn.params["permutation"])]
        if name == "broadcast_in_dim":
            return [_broadcast(eqn, inputs[0])]
        if name in ("reshape", "squeeze"):
            return [_reshape(eqn, inputs[0])]
        if name in ("slice", "dynamic_slice", "pad"):
            return [_slice(eqn, inputs[0])]
        return [self._elementwise(eqn, out, inputs) for out in eqn.outvars]

    def _elementwise(self, eqn: Any, out: Any, inputs: list[_Fact]) -> _Fact:
        result = self.constant(out)
        if eqn.primitive.name in _REORDERING:
            return result
        for atom, axes in zip(eqn.invars, inputs, strict=True):
            if atom.aval.shape == out.aval.shape:
                result = tuple(a or b for a, b in zip(result, axes, strict=True))
        return result


def _broadcast(eqn: Any, axes: _Fact) -> _Fact:
    operand, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    result: list[Axis | _Piece | None] = [None] * len(out)
    for axis, out_axis in enumerate(eqn.params["broadcast_dimensions"]):
        if operand[axis] == out[out_axis]:
            result[out_axis] = axes[axis]
    return tuple(result)


def _slice(eqn: Any, axes: _Fact) -> _Fact:
    """Keeps the axes whose size does not change."""
    operand, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    sizes = zip(axes, operand, out, strict=True)
    return tuple(axis if size == kept else None for axis, size, kept in sizes)


def _reshape(eqn: Any, axes: _Fact) -> _Fact:
    """Keeps and splits axes, and joins split ones; axes of size one do not matter."""
    operand, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    result: list[Axis | _Piece | None] = [None] * len(out)
    for before, after in reshapes.runs(operand, out):
        sizes = tuple(out[axis] for axis in after)
        made = _regrouped([axes[axis] for axis in before], sizes)
        for axis, one in zip(after, made, strict=True):
            result[axis] = one
    return tuple(result)


def _regrouped(axes: list[Axis | _Piece | None], sizes: tuple[int, ...]) -> _Fact:
    """Returns the axes after a reshape of `axes` to `sizes`."""
    first = axes[0]
    if len(axes) == len(sizes) == 1:
        return (first,)
    if len(axes) == 1 and isinstance(first, Axis):
        return tuple(_Piece(first, sizes, i) for i in range(len(sizes)))
    if len(sizes) == 1 and isinstance(first, _Piece):
        parts = [first._replace(number=i) for i in range(len(first.sizes))]
        return (first.whole if axes == parts else None,)
    return (None,) * len(sizes)
