"""The conversion itself: runs what a plan says, at once or one weight at a time."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from aqtlite.jaxpr import axes, slicing
from aqtlite.program.serving import identity
from aqtlite.program.serving.call_site import IDENTITY
from aqtlite.program.serving.model import Buffer, Parameter
from aqtlite.program.serving.planning import Weight
from aqtlite.qtensor.qtensor import QTensor


class ParameterAxis(NamedTuple):
    """An axis of a parameter, or of a buffer."""

    parameter: Parameter | Buffer
    axis: int


@dataclasses.dataclass(frozen=True)
class Stored:
    """The stored values of a frozen weight, and where their axes come from."""

    values: dict[str, Any]
    """The `QTensor` by its side, and values of floats where something stayed one."""

    axes: dict[str, Any]
    """The same, with a tuple in place of each array: for each of its axes the
    `ParameterAxis` that it is, if it is one."""


def freeze(
    weights: Sequence[Weight], params: Mapping[Parameter | Buffer, Any]
) -> list[Stored]:
    """Makes all weights, those of one call in one program.

    Args:
        weights: weights of a plan.
        params: the values of the parameters and buffers, or their shapes; then what is
            stored are shapes, too.
    """
    abstract = any(
        isinstance(params[one], jax.ShapeDtypeStruct)
        for weight in weights
        for read in (weight.sources, weight.buffers)
        for one in read
    )
    run = jax.eval_shape if abstract else _run
    made: dict[int, Stored] = {}
    traces = {id(weight.recorded.trace): weight.recorded.trace for weight in weights}
    for trace in traces.values():
        outputs = {
            i: weight.outputs
            for i, weight in enumerate(weights)
            if weight.recorded.trace is trace
        }
        part = slicing.slice_outputs(trace.jaxpr, outputs)
        variables: dict[int, Parameter | Buffer] = {}
        variables.update(trace.parameters)
        variables.update(trace.buffers)
        inputs = [variables[i] for i in part.inputs]
        values = run(part, *(params[parameter] for parameter in inputs))
        origins = part.unflatten(
            tuple(axis and ParameterAxis(inputs[axis.input], axis.axis) for axis in one)
            for one in axes.output_axes(part.jaxpr)
        )
        made.update({i: Stored(values[i], origins[i]) for i in outputs})
    for i, weight in enumerate(weights):
        if weight.compared:
            stay = [params[one] for one in weight.compared]
            sampled = run(lambda *stay: identity.sample_parameters(stay), *stay)
            made[i].values[IDENTITY], made[i].axes[IDENTITY] = sampled, (None,)
    return [made[i] for i in range(len(weights))]


def _run(function: Callable[..., Any], *args: Any) -> Any:
    return jax.jit(function)(*args)


class FrozenWeight(NamedTuple):
    """A frozen weight, and the cost of its quantization."""

    qtensor: QTensor
    signal: jax.Array
    """float32: the sum of the squares of the operand that was quantized."""

    noise: jax.Array
    """float32: the sum of the squares of what quantization changed."""

    identity: jax.Array | None = None
    """Values of what stays in float."""


class WeightFreezer:
    """Makes weights one at a time.

    Compiles programs that are the same only once, as those of equal layers are.
    """

    def __init__(self):
        self._compiled: dict[str, Any] = {}

    def freeze(self, weight: Weight, *params: Any) -> FrozenWeight:
        """Makes a weight of the values of its sources and buffers."""
        recorded = weight.recorded
        outputs = weight.outputs, recorded.outputs.smoothed
        part = slicing.slice_outputs(recorded.trace.jaxpr, outputs)
        sources = {**recorded.trace.parameters, **recorded.trace.buffers}
        places = [
            (*weight.sources, *weight.buffers).index(sources[i]) for i in part.inputs
        ]

        def run(*values: jax.Array) -> FrozenWeight:
            stored, smoothed = part(*(values[place] for place in places))
            qtensor = stored[weight.site.operand.side]
            measured = signal_and_noise(smoothed, qtensor)
            values_of_floats = stored.get(IDENTITY)
            if weight.compared:
                stay = [values[weight.sources.index(one)] for one in weight.compared]
                values_of_floats = identity.sample_parameters(stay)
            return FrozenWeight(qtensor, *measured, values_of_floats)

        lowered = jax.jit(run).lower(*params)
        text = lowered.as_text()
        if text not in self._compiled:
            self._compiled[text] = lowered.compile()
        return self._compiled[text](*params)


def signal_and_noise(x: jax.Array, qtensor: QTensor) -> tuple[jax.Array, jax.Array]:
    """Returns the sums of squares of an array, and of what quantization changed."""
    x = x.astype(jnp.float32)
    noise = x - dataclasses.replace(qtensor, dtype=jnp.dtype("float32")).dequant()
    return jnp.sum(x * x), jnp.sum(noise * noise)
