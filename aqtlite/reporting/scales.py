"""What the scales of contractions see: axes of arguments along which they are shared.

A scale that is found from an activation depends on all elements that share it. Where
these lie along the positions or the examples of an argument, the result of one depends
on the others, as it does not in float.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from aqtlite.contraction import poison, remat
from aqtlite.jaxpr.recognition import producers
from aqtlite.jaxpr.sites import Site
from aqtlite.lowering import target
from aqtlite.operations import Side
from aqtlite.shapes.sharding import describe

_SIDES: Mapping[str, tuple[Side, bool]] = {
    remat.LHS: ("lhs", False),
    remat.RHS: ("rhs", False),
    remat.LHS_SCALE: ("lhs", True),
    remat.RHS_SCALE: ("rhs", True),
}


@dataclasses.dataclass(frozen=True)
class Scale:
    """The scale of a quantized operand."""

    side: Side
    type: str
    """Its dtype and shape, with size 1 along axes that share it: "float32[8,1]"."""

    is_dynamic: bool
    """Whether it is found in the call, from other arguments than parameters. That it is
    NaN where the first or the last of them is does not count."""

    shared: tuple[tuple[str, int], ...]
    """Arguments and their axes along which it is shared: ``(("1", 0),)`` for the first
    axis of the second argument. Features, the last of several axes of floats, are not
    named, nor anything of scales that are not dynamic. Where another axis that comes
    from the same one has scales of its own, as rows of attention's probabilities have,
    each sees what its result does."""


@dataclasses.dataclass(frozen=True)
class Argument:
    """An input of a program."""

    name: str
    ndim: int
    is_float: bool
    is_parameter: bool

    def is_features(self, axis: int) -> bool:
        """Whether an axis is the last one of several of floats."""
        return self.is_float and axis == self.ndim - 1 > 0


def is_named(site: Site) -> bool:
    """Whether an equation names the values or the scale of an operand."""
    return site.eqn.params.get("name") in _SIDES


def of(
    named: Sequence[Site], arguments: Sequence[Argument], program: producers.Body
) -> tuple[Scale, ...]:
    """Returns the scales of a contraction.

    Args:
        named: equations that name its values and scales, in program order.
        arguments: the inputs of the program.
        program: the program.
    """
    values: dict[Side, Site] = {}
    scales: dict[Side, Site] = {}
    for site in named:
        side, is_scale = _SIDES[site.eqn.params["name"]]
        if is_scale:
            # A zero point is named before the scale that it belongs to.
            scales[side] = site
        else:
            values[side] = site
    return tuple(
        _scale(side, values[side], scales[side], arguments, program)
        for side in values
        if side in scales
    )


def _scale(
    side: Side,
    values: Site,
    scale: Site,
    arguments: Sequence[Argument],
    program: producers.Body,
) -> Scale:
    of_values, of_scale = (one.eqn.outvars[0].aval for one in (values, scale))
    is_dynamic = any(not arguments[i].is_parameter for i in scale.operands[0].inputs)
    is_dynamic = is_dynamic and not _is_static(scale, arguments, program)
    shared: set[tuple[int, int]] = set()
    if is_dynamic and of_values.ndim == of_scale.ndim:
        facts = values.operands[0].facts.axes
        sizes = list(zip(of_values.shape, of_scale.shape, facts, strict=True))
        for size, count, fact in sizes:
            if count < size:
                shared |= fact.sources
        for size, count, fact in sizes:
            if count == size > 1:
                shared -= fact.sources
    return Scale(side, describe(of_scale), is_dynamic, tuple(_named(shared, arguments)))


def _is_static(
    scale: Site, arguments: Sequence[Argument], program: producers.Body
) -> bool:
    """Whether a scale is made of parameters and constants, but for being NaN."""
    parameters = {
        var
        for var, one in zip(program.closed.jaxpr.invars, arguments, strict=True)
        if one.is_parameter
    }
    ahead = producers.operands(program, scale.location) or []
    seen: set[tuple[int, int]] = set()
    while ahead:
        value = ahead.pop()
        key = id(value.atom), id(value.body)
        if key in seen or value.constant is not None:
            continue
        seen.add(key)
        if value.maker is None:
            if value.body is not program or value.atom not in parameters:
                return False
        elif not isinstance(target.function_of(value.maker), poison.OfEnds):
            ahead += value.inputs
    return bool(seen)


def _named(
    shared: Collection[tuple[int, int]], arguments: Sequence[Argument]
) -> list[tuple[str, int]]:
    return [
        (arguments[i].name, axis)
        for i, axis in sorted(shared)
        if not arguments[i].is_features(axis)
    ]
