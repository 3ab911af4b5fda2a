"""The rules by which equations derive facts about axes (`axis_facts`)."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from aqtlite.jaxpr.axes import reshapes
from aqtlite.jaxpr.axes.axis_facts import (
    BROADCAST_AXIS,
    PLAIN_AXIS,
    VERY_NEGATIVE,
    AxisFact,
    Facts,
    either,
    joined,
)


def of_outputs(eqn: Any, inputs: Sequence[Facts]) -> list[Facts]:
    """Returns the facts about the outputs of an equation without a body.

    Args:
        eqn: the equation.
        inputs: the facts about its inputs.
    """
    name = eqn.primitive.name
    rule = _RULES.get(name)
    if rule is not None:
        return [rule(eqn, inputs)] * len(eqn.outvars)
    if name.startswith(("reduce_", "argm")) and "axes" in eqn.params:
        return [_reduced(eqn, inputs)] * len(eqn.outvars)
    return [_elementwise(eqn, out, inputs) for out in eqn.outvars]


_KEEP_ZERO = frozenset(
    {"abs", "cbrt", "ceil", "clamp", "convert_element_type", "copy"}
    | {"device_put", "div", "erf", "expm1", "floor", "integer_pow"}
    | {"log1p", "max", "min", "mul", "name", "neg"}
    | {"optimization_barrier", "pow", "real", "reduce_precision", "rev", "round"}
    | {"select_n", "sign", "sin", "sqrt", "square"}
    | {"stop_gradient", "tan", "tanh"}
)
"""Primitives whose result is zero where an operand is."""

_OF_EXPONENTIALS = frozenset({"exp", "exp2", "logistic"})


def _elementwise(eqn: Any, out: Any, inputs: Sequence[Facts]) -> Facts:
    """Facts of an elementwise function; of any other one, where shapes are equal."""
    shape = out.aval.shape
    found = [
        _stretched(facts, atom.aval.shape, shape)
        for atom, facts in zip(eqn.invars, inputs, strict=True)
        if _stretches(getattr(atom.aval, "shape", ()), shape)
    ]
    name = eqn.primitive.name
    is_constant = all(facts.is_constant for facts in inputs)
    if not found:
        return _of_other_sizes(eqn, out, inputs)
    axes = []
    for of_axis in zip(*(facts.axes for facts in found), strict=True):
        fact = either(of_axis)
        has_zeros = fact.has_zeros and name in _KEEP_ZERO
        if name in ("add", "sub"):
            has_zeros = all(one.has_zeros for one in of_axis)
        has_floor = fact.has_floor
        if name in _OF_EXPONENTIALS:
            has_zeros, has_floor = has_floor, False
        is_normalized = fact.is_normalized or _normalizes(name, found, of_axis)
        axes.append(
            fact._replace(
                has_zeros=has_zeros, has_floor=has_floor, is_normalized=is_normalized
            )
        )
    is_exponential = name in ("exp", "exp2") or (
        name in _KEEP_ZERO and any(facts.is_exponential for facts in found)
    )
    fill = found[0].fill if len(found) == len(inputs) == 1 else None
    kept = fill if name in ("convert_element_type", "copy") else None
    is_amount = all(facts.is_amount for facts in found) or _is_rounding(eqn)
    return Facts(tuple(axes), is_constant, kept, is_exponential, is_amount)


def _is_rounding(eqn: Any) -> bool:
    """Whether integers are made of floats, by a conversion or of their bits."""
    if eqn.primitive.name not in ("convert_element_type", "bitcast_convert_type"):
        return False
    before, after = (var.aval.dtype for var in (eqn.invars[0], eqn.outvars[0]))
    return jnp.issubdtype(before, np.floating) and jnp.issubdtype(after, np.integer)


def _of_other_sizes(eqn: Any, out: Any, inputs: Sequence[Facts]) -> Facts:
    """Facts of what has other sizes than every operand, such as a `top_k`."""
    ndim = len(out.aval.shape)
    is_constant = all(facts.is_constant for facts in inputs)
    alike = [facts for facts in inputs if len(facts.axes) == ndim]
    if not alike:
        return Facts((PLAIN_AXIS,) * ndim, is_constant)
    axes = (AxisFact(axis.sources) for axis in joined(alike).axes)
    return Facts(tuple(axes), is_constant)


def _stretches(shape: Sequence[int], out: Sequence[int]) -> bool:
    """Whether an array of one shape broadcasts to another one of its rank."""
    return len(shape) == len(out) and all(
        size in (1, wanted) for size, wanted in zip(shape, out, strict=True)
    )


def _stretched(facts: Facts, shape: Sequence[int], out: Sequence[int]) -> Facts:
    if tuple(shape) == tuple(out):
        return facts
    axes = (
        axis if size == wanted else BROADCAST_AXIS
        for axis, size, wanted in zip(facts.axes, shape, out, strict=True)
    )
    return facts._replace(axes=tuple(axes))


def _normalizes(
    name: str, found: Sequence[Facts], of_axis: tuple[AxisFact, ...]
) -> bool:
    """Whether an operand varies along an axis, and another, of inputs, does not."""
    if name not in ("sub", "div", "mul") or len(found) != 2:
        return False
    first, second = (axis.varies for axis in of_axis)
    still = found[0] if second and not first else found[1]
    return first != second and not still.is_constant


def _select(eqn: Any, inputs: Sequence[Facts]) -> Facts:
    """A mask where a case is a constant: zero, or a very negative number."""
    condition, *cases = inputs
    is_constant = all(facts.is_constant for facts in inputs)
    made = joined(cases)._replace(is_constant=is_constant)
    fills = [case.fill for case in cases if case.is_constant]
    is_zero = any(fill == 0 for fill in fills)
    is_floor = any(fill is not None and fill <= VERY_NEGATIVE for fill in fills)
    if len(condition.axes) != len(made.axes):
        return made
    axes = tuple(
        axis._replace(
            sources=axis.sources | of.sources,
            has_zeros=axis.has_zeros or (is_zero and of.varies),
            has_floor=axis.has_floor or (is_floor and of.varies),
            varies=axis.varies or of.varies,
        )
        for axis, of in zip(made.axes, condition.axes, strict=True)
    )
    return made._replace(axes=axes)


def _convert(eqn: Any, inputs: Sequence[Facts]) -> Facts:
    """A mask where a bool, or an integer of an input, becomes a number.

    A sum of products and a rounded number are none: they are zero by chance.
    """
    made = _elementwise(eqn, eqn.outvars[0], inputs)
    kind = np.dtype(eqn.invars[0].aval.dtype).kind
    is_of_inputs = any(axis.sources for axis in made.axes)
    is_mask = kind == "b" or (kind in "iu" and is_of_inputs and not made.is_amount)
    if not is_mask:
        return made
    axes = (axis._replace(has_zeros=axis.varies) for axis in made.axes)
    return made._replace(axes=tuple(axes))


def _transpose(eqn: Any, inputs: Sequence[Facts]) -> Facts:
    (facts,) = inputs
    axes = tuple(facts.axes[axis] for axis in eqn.params["permutation"])
    return facts._replace(axes=axes)


def _broadcast(eqn: Any, inputs: Sequence[Facts]) -> Facts:
    facts, *_ = inputs
    operand, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    axes = [BROADCAST_AXIS] * len(out)
    for axis, out_axis in enumerate(eqn.params["broadcast_dimensions"]):
        if operand[axis] == out[out_axis]:
            axes[out_axis] = facts.axes[axis]
    return facts._replace(axes=tuple(axes))


def _reshape(eqn: Any, inputs: Sequence[Facts]) -> Facts:
    facts, *_ = inputs
    operand, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    axes = [BROADCAST_AXIS] * len(out)
    for before, after in reshapes.runs(operand, out):
        fact = either(tuple(facts.axes[axis] for axis in before))
        if len(before) > 1 or len(after) > 1:
            fact = fact._replace(padding=(0, 0))
        for axis in after:
            axes[axis] = fact
    return facts._replace(axes=tuple(axes))


def _reduced(eqn: Any, inputs: Sequence[Facts]) -> Facts:
    facts, *_ = inputs
    gone = eqn.params["axes"]
    is_sum = eqn.primitive.name == "reduce_sum"
    axes = tuple(
        AxisFact(
            axis.sources,
            axis.varies,
            has_zeros=is_sum and axis.has_zeros,
            padding=axis.padding,
        )
        for i, axis in enumerate(facts.axes)
        if i not in gone
    )
    return Facts(axes, facts.is_constant)


def _iota(eqn: Any, inputs: Sequence[Facts]) -> Facts:
    del inputs
    ndim, own = len(eqn.outvars[0].aval.shape), eqn.params["dimension"]
    axes = (PLAIN_AXIS if axis == own else BROADCAST_AXIS for axis in range(ndim))
    return Facts(tuple(axes), is_constant=True)


def _slice(eqn: Any, inputs: Sequence[Facts]) -> Facts:
    facts, *_ = inputs
    shapes = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    axes = tuple(
        axis if size == kept else axis._replace(padding=(0, 0))
        for axis, size, kept in zip(facts.axes, *shapes, strict=True)
    )
    return facts._replace(axes=axes)


def _pad(eqn: Any, inputs: Sequence[Facts]) -> Facts:
    facts, _ = inputs
    axes = tuple(
        axis._replace(padding=(axis.padding[0] + low, axis.padding[1] + high))
        for axis, (low, high, _) in zip(
            facts.axes, eqn.params["padding_config"], strict=True
        )
    )
    return facts._replace(axes=axes, fill=None)


def _concatenate(eqn: Any, inputs: Sequence[Facts]) -> Facts:
    """What surrounds the longest operand counts as its padding."""
    joint = eqn.params["dimension"]
    sizes = [atom.aval.shape[joint] for atom in eqn.invars]
    made = joined(inputs)
    if not all(isinstance(size, int) for size in sizes):
        return made
    longest = sizes.index(max(sizes))
    low, high = inputs[longest].axes[joint].padding
    padding = low + sum(sizes[:longest]), high + sum(sizes[longest + 1 :])
    axes = list(made.axes)
    axes[joint] = axes[joint]._replace(padding=padding, varies=True)
    is_constant = all(facts.is_constant for facts in inputs)
    return made._replace(axes=tuple(axes), is_constant=is_constant)


def _dot_general(eqn: Any, inputs: Sequence[Facts]) -> Facts:
    contracting, batch = eqn.params["dimension_numbers"]
    operands, shapes = inputs[:2], [atom.aval.shape for atom in eqn.invars[:2]]
    remaining = [
        [i for i in range(len(shape)) if i not in (*taken, *both)]
        for shape, taken, both in zip(shapes, contracting, batch, strict=True)
    ]
    is_masked = [any(axis.has_zeros for axis in x.axes) for x in operands]
    if not contracting[0] or all(is_masked):
        # Each element is a product; or products of triangular matrices are triangular,
        # and those of choices are choices.
        keeps = [tuple(range(len(shape))) for shape in shapes]
    else:
        # The other operand may weight choices: then it has no axes of its own.
        is_weighted = [
            all(shape[i] == 1 for i in others)
            for shape, others in zip(shapes[::-1], remaining[::-1], strict=True)
        ]
        of_each = zip(operands, contracting, batch, remaining, is_weighted, strict=True)
        keeps = [
            (*both, *slots) if weighted and (slots := _slots(x, taken, others)) else ()
            for x, taken, both, others, weighted in of_each
        ]
    lhs, rhs = (
        [
            AxisFact(
                axis.sources,
                has_zeros=axis.has_zeros and i in kept,
                padding=axis.padding,
            )
            for i, axis in enumerate(x.axes)
        ]
        for x, kept in zip(operands, keeps, strict=True)
    )
    shared = [either((lhs[i], rhs[j])) for i, j in zip(*batch, strict=True)]
    axes = (
        *(axis._replace(padding=(0, 0)) for axis in shared),
        *(lhs[i] for i in remaining[0]),
        *(rhs[i] for i in remaining[1]),
    )
    is_constant = all(x.is_constant for x in operands)
    return Facts(axes, is_constant, is_amount=bool(contracting[0]))


def _slots(
    facts: Facts, contracted: Sequence[int], remaining: Sequence[int]
) -> tuple[int, ...]:
    """The axes of what an input chooses, of each of several choices that are summed.

    Such are experts and their slots, which a mask made of indices has and no input:
    most of them are zero in all choices. Positions that an input has are not among
    them: a sum over what they see, or over a type that each has, is zero nowhere.
    """
    is_chosen = any(axis.sources for axis in facts.axes)
    if not is_chosen or not any(facts.axes[i].has_zeros for i in contracted):
        return ()
    return tuple(
        i for i in remaining if facts.axes[i].has_zeros and not facts.axes[i].sources
    )


def _conv(eqn: Any, inputs: Sequence[Facts]) -> Facts:
    """Positions and examples are those of the input, features those of the kernel."""
    lhs, rhs = inputs
    spec = eqn.params["dimension_numbers"]
    axes = [PLAIN_AXIS] * len(spec.out_spec)
    pairs = zip(spec.lhs_spec, spec.out_spec, strict=True)
    for number, (axis, out_axis) in enumerate(pairs):
        of = rhs.axes[spec.rhs_spec[0]] if number == 1 else lhs.axes[axis]
        axes[out_axis] = AxisFact(of.sources)
    is_constant = lhs.is_constant and rhs.is_constant
    return Facts(tuple(axes), is_constant, is_amount=True)


def _gather(eqn: Any, inputs: Sequence[Facts]) -> Facts:
    """Whole axes of the operand are kept, the others come from the indices."""
    operand, indices = inputs[:2]
    dims, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    gone = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
    kept = [axis for axis in range(len(operand.axes)) if axis not in gone]
    chosen = frozenset().union(*(operand.axes[axis].sources for axis in gone))
    of_operand, of_indices = iter(kept), iter(indices.axes[:-1])
    shape = eqn.invars[0].aval.shape
    axes = []
    for axis in range(len(eqn.outvars[0].aval.shape)):
        if axis in dims.offset_dims:
            own = next(of_operand)
            fact = AxisFact(operand.axes[own].sources)
            if sizes[own] == shape[own]:
                fact = operand.axes[own]
        else:
            fact = AxisFact(next(of_indices).sources | chosen)
        axes.append(fact)
    return Facts(tuple(axes), operand.is_constant and indices.is_constant)


_RULES: dict[str, Callable[[Any, Sequence[Facts]], Facts]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "conv_general_dilated": _conv,
    "convert_element_type": _convert,
    "dot_general": _dot_general,
    "dynamic_slice": _slice,
    "gather": _gather,
    "iota": _iota,
    "pad": _pad,
    "reshape": _reshape,
    "select_n": _select,
    "slice": _slice,
    "squeeze": _reshape,
    "transpose": _transpose,
}
