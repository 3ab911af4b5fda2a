"""Runs the plan of a conversion, all weights at once or one at a time.

Independent of the framework: a `Model` puts the frozen weights into its variables.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from aqtlite.jaxpr import slicing
from aqtlite.program.serving import given as given_lib
from aqtlite.program.serving import identity, packing
from aqtlite.program.serving import report as report_lib
from aqtlite.program.serving.framework import Model
from aqtlite.program.serving.frozen_record import IDENTITY, FrozenEntry
from aqtlite.program.serving.model import CallTrace
from aqtlite.program.serving.planning import Plan
from aqtlite.program.serving.report import ConversionReport
from aqtlite.program.serving.weight import Weight
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization import gptq


def check_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    what: str,
) -> None:
    """Checks that a function accepts the arguments of a call, before tracing it.

    Args:
        function: the function. Without a known signature it accepts any arguments.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        what: the caller and how it passes the arguments, for the message.

    Raises:
        TypeError: if the arguments do not fit the signature.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        raise TypeError(f"{what}; {name} cannot be called so: {error}") from error


def convert(
    plan: Plan,
    *,
    strict: bool = False,
    report: Callable[[ConversionReport], Any] | None = None,
    packed: str | None = None,
) -> Any:
    """Returns the serving variables of a plan, and reports on every parameter.

    Args:
        plan: the plan.
        strict: raise if a weight stays in float.
        report: function to call with the `ConversionReport`.
        packed: platform to pack the weights for; None for none.

    Raises:
        ValueError: if the platform has no packed form; with `strict`, if a weight stays
            in float. No variable has changed by then.
    """
    packing.check(packed)
    stored = freeze(plan)
    if packed is not None:
        stored = packing.packed(plan, stored)
    summary = report_lib.report_of(plan, stored)
    if strict:
        report_lib.check_all_frozen(summary)
    report_lib.log(summary)
    if report is not None:
        report(summary)
    return plan.model.serving(plan.weights, stored, plan.placeholders())


def serving(plan: Plan, packed: Collection[tuple[str, ...]] = ()) -> Any:
    """Returns the serving variables of a plan.

    Args:
        plan: the plan.
        packed: `Weight.path` of the weights to pack.
    """
    stored = [
        packing.entry(one) if weight.path in packed else one
        for weight, one in zip(plan.weights, freeze(plan), strict=True)
    ]
    return plan.model.serving(plan.weights, stored, plan.placeholders())


def freeze(plan: Plan) -> list[FrozenEntry]:
    """Quantizes all weights of a plan, with one program per traced call.

    Weights of parameters that were given as `QTensor`s keep their integers where they
    are only moved, and else are rounded again one at a time. Returns shapes in place of
    arrays if the model's variables are shapes.
    """
    weights, variables = plan.weights, plan.model.values
    abstract = any(
        isinstance(variables[one], jax.ShapeDtypeStruct)
        for weight in weights
        for one in weight.inputs
    )
    run = jax.eval_shape if abstract else _Programs()
    values: dict[int, Any] = {}
    dampings: dict[int, Any] = {}
    notes: dict[int, str] = {}
    freezer = WeightFreezer()
    given = plan.model.given
    for trace, numbers in _programs_of(weights, given):
        # By position: equal weights have equal programs, down to the names of results.
        outputs = [weights[i].outputs for i in numbers]
        of_rounding = [weights[i].made.damping for i in numbers]
        part = slicing.slice_outputs(trace.jaxpr, (outputs, of_rounding))
        inputs = [trace.inputs[i] for i in part.inputs]
        if not any(one in given for one in inputs):
            made, damping = run(part, *(variables[one] for one in inputs))
        else:
            (i,) = numbers
            made, damping, notes[i] = _of_given(freezer, weights[i], part, plan.model)
        values.update(zip(numbers, made, strict=True))
        dampings.update(zip(numbers, damping, strict=True))
    for i, weight in enumerate(weights):
        _warn_of_rounding(weight, dampings[i])
        if weight.compared:
            stay = [plan.model.float_value(one) for one in weight.compared]
            sample = run(lambda *stay: identity.sample_parameters(stay), *stay)
            values[i][IDENTITY] = sample
    return [
        FrozenEntry(
            weight.module,
            weight.name,
            weight.record,
            values[i],
            ", ".join(filter(None, (notes.get(i), _rounding_of(weight, dampings[i])))),
        )
        for i, weight in enumerate(weights)
    ]


def _of_given(
    freezer: "WeightFreezer", weight: Weight, part: slicing.Slice, model: Model
) -> tuple[Any, Any, str]:
    """Freezes a weight of parameters that were given as `QTensor`s.

    Args:
        freezer: what prepares weights.
        weight: the weight.
        part: the program that quantizes it and no other.
        model: the model.

    Returns:
        As `part`: the arrays to store and the damping, in lists; and what became of the
        integers.
    """
    side = weight.record.operand.side
    wanted, _ = jax.eval_shape(part, *part.jaxpr.in_avals)
    prepared = functools.partial(freezer.prepared, weight)
    kept = given_lib.kept(weight, model.given, wanted[0][side], prepared)
    if kept is not None:
        return [{side: kept}], [None], given_lib.KEPT
    inputs = [weight.trace.inputs[i] for i in part.inputs]
    made, damping = jax.jit(part)(*map(model.float_value, inputs))
    logging.warning(
        "%s was given quantized (%s), and its integers are rounded again: the config "
        "makes %s of it, or the model does more with it than move it",
        " and ".join(map(str, weight.parameters)),
        ", ".join(repr(model.given[x]) for x in inputs if x in model.given),
        wanted[0][side],
    )
    return made, damping, given_lib.ROUNDED_AGAIN


def _programs_of(
    weights: Sequence[Weight], given: Container[Any]
) -> list[tuple[CallTrace, list[int]]]:
    """Returns the programs that make weights: their traces, and indices of weights.

    A weight with a rounding of its own, or that is given, is made by a program of its
    own: its arrays are gone before the next, and equal layers share one compiled
    program.

    Args:
        weights: the weights.
        given: the parameters that were given as `QTensor`s.
    """
    together: dict[int, tuple[CallTrace, list[int]]] = {}
    alone = []
    for i, weight in enumerate(weights):
        trace = weight.trace
        is_given = any(one in given for one in weight.inputs)
        if is_given or weight.made.damping is not None:
            alone.append((trace, [i]))
        else:
            together.setdefault(id(trace), (trace, []))[1].append(i)
    return [*together.values(), *alone]


def _rounding_of(weight: Weight, damping: Any) -> str:
    """Describes whether a weight is sparse, and how it was rounded.

    Args:
        weight: the weight.
        damping: its damping, or the shape; None if it was rounded as in training.
    """
    pruned, how = weight.made.sparsity, weight.record.cfg.fwd.rhs.rounding
    texts = [] if pruned is None else [f"{pruned} sparse"]
    if how is not None and _is_known(damping):
        texts.append(gptq.describe(how, np.ravel(damping)))
    elif damping is not None:
        texts.append("rounded by GPTQ at conversion")
    return ", ".join(texts)


def _warn_of_rounding(weight: Weight, damping: Any) -> None:
    """Logs where a weight was not rounded as its config asks."""
    how = weight.record.cfg.fwd.rhs.rounding
    if how is None or not _is_known(damping):
        return
    problem = gptq.problem(how, np.ravel(damping))
    if problem is not None:
        logging.warning("%s: %s", "/".join(weight.path), problem)


def _is_known(damping: Any) -> bool:
    """Whether a damping is an array of values."""
    return isinstance(damping, jax.Array) and not isinstance(damping, jax.core.Tracer)


class _Programs:
    """Runs functions, of which those with identical programs are compiled once."""

    def __init__(self) -> None:
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
            return jax.jit(function)(*args)
        with jax.disable_jit(False):  # Compiled programs refuse to run without.
            lowered = jax.jit(function).lower(*args)
            places = (getattr(x, "sharding", None) for x in jax.tree.leaves(args))
            key = lowered.as_text(), *places
            if key not in self._compiled:
                self._compiled[key] = lowered.compile()
            return self._compiled[key](*args)


class FrozenWeight(NamedTuple):
    """A frozen weight and its quantization error."""

    qtensor: QTensor
    signal: jax.Array
    """Sum of squares of the smoothed float operand, float32."""

    noise: jax.Array
    """Sum of squares of the quantization error, float32."""

    identity: jax.Array | None = None
    """Values that identify the float operand or parameters that stay beside it."""

    damping: jax.Array | None = None
    """Damping of a rounding by GPTQ."""


class WeightFreezer:
    """Quantizes weights one at a time.

    Identical programs, as of equal layers, are compiled once.
    """

    def __init__(self):
        self._run = _Programs()

    def prepared(self, weight: Weight, *params: Any) -> jax.Array:
        """The array that is quantized, from the values of the weight's `inputs`.

        The values are cast to the dtypes of the inputs.
        """
        part = slicing.slice_outputs(weight.trace.jaxpr, (weight.made.prepared,))
        read = weight.trace.inputs
        places = [weight.inputs.index(read[i]) for i in part.inputs]

        dtypes = [aval.dtype for aval in part.jaxpr.in_avals]

        def run(*values: jax.Array) -> jax.Array:
            taken = [values[place] for place in places]
            (array,) = part(*map(jnp.asarray, taken, dtypes))
            return array

        found: jax.Array = self._run(run, *params)
        return found

    def freeze(self, weight: Weight, *params: Any) -> FrozenWeight:
        """Quantizes a weight from the values of its `inputs`, in order."""
        made = weight.made
        outputs = weight.outputs, made.signal, made.noise, made.damping
        part = slicing.slice_outputs(weight.trace.jaxpr, outputs)
        read = weight.trace.inputs
        places = [weight.inputs.index(read[i]) for i in part.inputs]

        def run(*values: jax.Array) -> FrozenWeight:
            stored, *measured, damping = part(*(values[place] for place in places))
            qtensor = stored[weight.record.operand.side]
            values_of_floats = stored.get(IDENTITY)
            if weight.compared:
                stay = [values[weight.inputs.index(one)] for one in weight.compared]
                values_of_floats = identity.sample_parameters(stay)
            signal, noise = map(jnp.sum, measured)
            return FrozenWeight(qtensor, signal, noise, values_of_floats, damping)

        frozen: FrozenWeight = self._run(run, *params)
        _warn_of_rounding(weight, frozen.damping)
        return frozen
