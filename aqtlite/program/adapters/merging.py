"""Merges adapters into the parameters that their weights are made of."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import errors
from aqtlite.jaxpr import changes, rewriting, slicing, tracing
from aqtlite.jaxpr.axes import axes
from aqtlite.jaxpr.replacement import Location, Replacement
from aqtlite.program import served
from aqtlite.program import steps as steps_lib
from aqtlite.program.adapters import low_rank
from aqtlite.program.planned import PlannedContraction
from aqtlite.program.program import Program
from aqtlite.program.served import Entries
from aqtlite.program.serving.contraction import Contraction
from aqtlite.program.serving.model import ParameterAxis
from aqtlite.program.serving.placeholder import Placeholder
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization import double_scales
from aqtlite.shapes import sharding

_TINY = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class MergedWeight:
    """What merging an adapter changes in one weight."""

    path: str
    """Path of the contraction."""

    update: float
    """Norm of the adapter's product, relative to that of the weight."""

    rounding_error: float | None
    """Norm of the error of rounding the merged weight by the rule's config, relative to
    that of the adapter's product: near or above 1, integers lose what was trained. None
    if the rule leaves the contraction in float."""


@dataclasses.dataclass(frozen=True)
class MergeReport:
    """What merging adapters changes; prints as a table."""

    weights: tuple[MergedWeight, ...]

    def __str__(self) -> str:
        width = max([4, *(len(one.path) for one in self.weights)])
        lines = [f"{'path':{width}}  update / weight  rounding error / update"]
        for one in self.weights:
            error = "in float"
            if one.rounding_error is not None:
                error = f"{one.rounding_error:.3f}"
            lines.append(f"{one.path:{width}}  {one.update:15.4f}  {error:>23}")
        return "\n".join(lines)


class Weight(NamedTuple):
    """A weight with an adapter, or that is frozen."""

    one: PlannedContraction
    frozen: QTensor | None
    steps: tuple[bool, ...]
    """For each scan around it, whether it has a weight for each step."""


def merge(
    program: Program, values: Sequence[Any], frozen: Entries, converter: str
) -> tuple[dict[int, jax.Array], MergeReport]:
    """Returns the parameters with the products of their adapters added.

    A weight may be moved parameters: cast, transposed, reshaped, sliced, stacked. The
    product moves back the same way, which is the transpose of these operations.

    Args:
        program: the call.
        values: inputs of its jaxpr; placeholders for frozen parameters, which are
            dequantized.
        frozen: the frozen weights, by module.
        converter: the user's call of the conversion, for messages.

    Returns:
        Changed inputs of the jaxpr by index, and what changed.

    Raises:
        ValueError: if there is no adapter, if a weight is more than moved parameters,
            if two contractions of one weight have adapters, if something else reads it,
            or if the smoothing of its contraction is absorbed.
    """
    weights = weights_of(program, values, frozen, converter)
    if not any(one.adapter for one, _, _ in weights.values()):
        raise ValueError("there is nothing to merge: no rule has an adapter")
    made, before = read_by(program, values, weights)
    operands, pull = jax.vjp(made, *before)
    wanted, merged = {}, []
    for location, weight in weights.items():
        base = base_of(program, weight, operands[location])
        wanted[location] = base
        if weight.one.adapter is None:
            continue
        whole = _merged(program, weight, base)
        update = whole - base.astype(jnp.float32)
        wanted[location] = whole.astype(base.dtype)
        merged.append(_measured(program, weight, base, update, wanted[location]))
    updates = jax.tree.map(jnp.subtract, wanted, operands)
    after = [x + update for x, update in zip(before, pull(updates), strict=True)]
    for location, got in made(*after).items():
        check_reached(weights[location].one, got, wanted[location])
    pairs = dict(zip(made.inputs, zip(before, after, strict=True), strict=True))
    _check_unread(program, weights, pairs)
    return {i: value for i, (_, value) in pairs.items()}, MergeReport(tuple(merged))


def read_by(
    program: Program, values: Sequence[Any], weights: Mapping[Location, Weight]
) -> tuple[slicing.Slice, list[Any]]:
    """Returns the function from parameters to weights, by location, and its inputs.

    Args:
        program: the call.
        values: inputs of its jaxpr; placeholders for frozen parameters, which are taken
            as zeros.
        weights: the weights.
    """
    made = function_of(program, weights)
    read = [values[i] for i in made.inputs]
    return made, [
        jnp.zeros(x.shape, x.dtype)
        if isinstance(x, Placeholder)
        else x
        if isinstance(x, jax.ShapeDtypeStruct)
        else jnp.asarray(x)
        for x in read
    ]


def weights_of(
    program: Program, values: Sequence[Any], frozen: Entries, converter: str
) -> dict[Location, Weight]:
    """Returns the weights with adapters, and those that are frozen, by contraction.

    The arguments are those of `merge`.
    """
    gone = {i for i, x in enumerate(values) if isinstance(x, Placeholder)}
    found = {}
    for one, module, _ in program.numbered():
        entries = frozen.get(module, ())
        sides = served.find(program, one, gone, entries, converter)
        if isinstance(one, PlannedContraction) and "rhs" in sides:
            steps = steps_lib.frozen_per_step(one) or ()
            found[one.site.location] = Weight(one, sides["rhs"].qtensor, steps)
    for one in program.plan.replaced():
        if one.adapter is not None and one.site.location not in found:
            steps = steps_lib.weights_per_step(one)
            found[one.site.location] = Weight(one, None, steps)
    return found


def function_of(program: Program, weights: Mapping[Location, Weight]) -> slicing.Slice:
    """Returns the function from parameters to weights, by location."""

    def replacement(weight: Weight) -> Replacement:
        def function(values: Sequence[Any], given: None) -> tuple[Any, Any]:
            del given
            one = weight.one
            return one.in_float(values), one.in_order(values)[1]

        return Replacement(function, has_aux=True, per_step=weight.steps)

    replacements = {at: replacement(weight) for at, weight in weights.items()}

    def run(values: list[Any]) -> Any:
        _, aux = rewriting.evaluate(program.traced.jaxpr, values, replacements)
        return {location: aux[location] for location in weights}

    inputs = [sharding.shape_of(aval) for aval in program.traced.jaxpr.in_avals]
    traced = tracing.trace(run, (inputs,))
    return slicing.slice_outputs(traced.jaxpr, traced.outputs)


def axes_of_weights(
    program: Program,
) -> dict[Location, Sequence[ParameterAxis | None]]:
    """Returns the axes of parameters that are those of weights with adapters.

    Args:
        program: the call.

    Returns:
        For each contraction with an adapter, one for each axis of its weight, after
        those of the scans around with a weight for each step.
    """
    weights = {
        one.site.location: Weight(one, None, steps_lib.weights_per_step(one))
        for one in program.plan.replaced()
        if one.adapter is not None
    }
    part = function_of(program, weights)
    read = [program.parameters.get(i) for i in part.inputs]

    def named(axis: axes.Axis | None) -> ParameterAxis | None:
        parameter = None if axis is None else read[axis.input]
        if axis is None or parameter is None:
            return None
        return ParameterAxis(parameter, axis.axis)

    found: dict[Location, Sequence[ParameterAxis | None]] = part.unflatten(
        [tuple(map(named, one)) for one in axes.output_axes(part.jaxpr)]
    )
    return found


def _merged(program: Program, weight: Weight, base: jax.Array) -> jax.Array:
    """Returns a weight with its adapter, float32."""
    one = weight.one
    states = program.states_of(one)
    adapter = low_rank.parameters(one, states)
    if jax.tree.leaves(states.smoothing) and states.smoothing.is_absorbed:
        raise ValueError(
            f"the adapter of {errors.quoted(one.path)} cannot be merged: the module "
            "before it has absorbed the scales of its smoothing, by which the weight "
            "is multiplied and the adapter is not. Serve the adapter beside the "
            "weight, or merge it before absorb_smoothing"
        )
    if sum(one.site.per_step) != sum(weight.steps):
        raise ValueError(
            f"the adapters of {errors.quoted(one.path)} cannot be merged: the steps of "
            "a scan have one each, and share the weight"
        )
    merged = low_rank.merged_by(one)
    for _ in range(sum(one.site.per_step)):
        merged = jax.vmap(merged)
    return merged(base, adapter)


def _measured(
    program: Program, weight: Weight, base: Any, update: Any, wanted: Any
) -> MergedWeight:
    """Returns what merging changes in a weight, and what rounding it would."""
    one, size = weight.one, float(jnp.linalg.norm(update))
    relative = size / max(float(jnp.linalg.norm(base)), _TINY)
    if not one.cfg.fwd.rhs.is_quantized:
        return MergedWeight(one.path, relative, None)
    error = float(jnp.linalg.norm(_rounded(program, weight, wanted) - wanted))
    return MergedWeight(one.path, relative, error / size if size else 0.0)


def base_of(program: Program, weight: Weight, w: jax.Array) -> jax.Array:
    """Returns the weight beside which an adapter is trained, in float.

    Args:
        program: the call.
        weight: the weight.
        w: its value, if it is not frozen.
    """
    if weight.frozen is None:
        return _rounded(program, weight, w)
    wide = dataclasses.replace(weight.frozen, dtype=jnp.dtype(jnp.float32)).dequant()
    found = _of_contraction(program, weight, Contraction.restored_rhs, wide)
    return found.astype(weight.frozen.dtype)


def _rounded(program: Program, weight: Weight, w: jax.Array) -> jax.Array:
    """Returns a weight rounded as the rule's config rounds it."""
    if not weight.one.cfg.fwd.rhs.is_quantized:
        return w

    def rounded(call: Contraction, w: jax.Array) -> jax.Array:
        found = double_scales.decoded(call.weight_outputs("rhs").qtensor)
        wide = dataclasses.replace(found, dtype=jnp.dtype(jnp.float32))
        return call.restored_rhs(wide.dequant()).astype(w.dtype)

    return _of_contraction(program, weight, rounded, w)


def _of_contraction(
    program: Program,
    weight: Weight,
    function: Callable[[Contraction, jax.Array], jax.Array],
    w: jax.Array,
) -> jax.Array:
    """Evaluates a function of a contraction and its weight, for each step of scans.

    The other operands of the contraction are zeros.
    """
    one = weight.one
    avals = [atom.aval for atom in one.site.eqn.invars]
    x, _, *others = one.in_order(avals)
    x, *others = (jnp.zeros(aval.shape, aval.dtype) for aval in (x, *others))

    def of_step(w: jax.Array, states: Any) -> jax.Array:
        values = one.in_order([x, w, *others])
        return function(program.contraction(one, values, states), w)

    states = program.states_of(one)._replace(adapter=())
    for _ in range(sum(weight.steps)):
        of_step = jax.vmap(of_step)
    return of_step(w, states)


def check_reached(one: PlannedContraction, got: Any, wanted: Any) -> None:
    """Checks that merged parameters give the weight that was wanted."""
    tolerance = 8 * float(jnp.finfo(wanted.dtype).eps)
    largest = float(jnp.max(jnp.abs(wanted), initial=0.0))
    if not jnp.allclose(got, wanted, rtol=tolerance, atol=tolerance * largest):
        raise ValueError(
            f"the adapter of {errors.quoted(one.path)} cannot be merged into "
            f"{' and '.join(map(repr, one.parameters))}: the weight is more than moved "
            "parameters, or another contraction of it has an adapter of its own. "
            "Serve the adapter beside the weight"
        )


def _check_unread(
    program: Program,
    weights: Mapping[Location, Weight],
    changed: Mapping[int, tuple[jax.Array, jax.Array]],
) -> None:
    """Checks that nothing but the weights themselves sees that parameters change."""
    unread = {at: {weight.one.index("rhs")} for at, weight in weights.items()}
    seen = changes.seen(program.traced.jaxpr, changed, unread)
    if not seen:
        return
    index = min(seen)
    adapted = [
        repr(one.path)
        for one, _, _ in weights.values()
        if one.adapter is not None and index in one.origins["rhs"].needed
    ]
    raise ValueError(
        f"the adapter of {' and '.join(adapted)} cannot be merged into "
        f"{str(program.parameters[index])!r}: something else reads it, too (such as a "
        "lookup of an embedding, or a contraction without an adapter), and would see "
        "the change. Serve the adapter beside the weight"
    )
