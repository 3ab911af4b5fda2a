"""Corrects the biases of converted models for the mean errors of their kernels."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
from flax import core as flax_core
from flax import linen as nn

from aqtlite.flax.linen import caller, given_variables, quantized_call
from aqtlite.flax.linen.quantize_model import Model, QuantizedModel, check_model
from aqtlite.jaxpr import tracing
from aqtlite.jaxpr.replacement import Location
from aqtlite.operations import SIDES
from aqtlite.program import biases, plan
from aqtlite.program.modules import flax_models
from aqtlite.program.serving import statistics_uses
from aqtlite.program.serving.frozen_record import COLLECTION, frozen_entries
from aqtlite.program.serving.model import Parameter, parameters_of
from aqtlite.quantization.states.state_collections import PARAMETERS


def correct_biases(
    model: Model,
    variables: Mapping[str, Any],
    serving: Mapping[str, Any],
    batches: Iterable[Any],
    **kwargs: Any,
) -> dict[str, Any]:
    """Adds the mean error of each layer's outputs to its bias (Nagel et al. 2019).

    A kernel W that is rounded to Q changes the mean of the outputs by ``E[x] (Q - W)``,
    which the bias can take back (arXiv:1906.04721, section 4.2). The inputs ``x`` are
    those of the float model. The bias of a layer is the parameter that is added to the
    result of its contraction; layers without one, and those in `nn.scan` and `nn.vmap`,
    stay as they are.

    Args:
        model: Linen module with injected functions, or a `QuantizedModel`.
        variables: variables of training.
        serving: what `convert` made of them.
        batches: inputs, each a tuple of positional arguments or a single argument; all
            of their elements count alike: there is no mask=. A batch that gives NaN or
            infinity is left out, with a warning.
        **kwargs: other arguments of `apply`, such as ``train=False``. They are
            constants of the compiled program.

    Returns:
        `serving` with other biases.

    Raises:
        TypeError: as for `calibrate`.
        ValueError: if there is no batch or no such layer, or for a layer with smoothing
            or rotation.

    >>> import jax.numpy as jnp
    >>> from aqtlite import config
    >>> from aqtlite.flax import AqtDotGeneral, convert
    >>> model = nn.Dense(4, dot_general=AqtDotGeneral(config.weight_only(3)))
    >>> x = jnp.linspace(0, 1, 24).reshape(8, 3)
    >>> variables = model.init(jax.random.key(0), x)
    >>> serving = convert(model, variables, x)
    >>> serving = correct_biases(model, variables, serving, [x])
    >>> exact = x @ variables["params"]["kernel"]
    >>> bool(jnp.abs((model.apply(serving, x) - exact).mean(0)).max() < 1e-6)
    True
    """
    check_model(model, "correct_biases")
    variables = given_variables.unfrozen(variables)
    changed = {name: flax_core.unfreeze(value) for name, value in serving.items()}
    module = model.model if isinstance(model, QuantizedModel) else model

    def run(variables: Any, args: tuple[Any, ...]) -> Any:
        with caller.in_float():
            return module.apply(variables, *args, **kwargs)

    @jax.jit
    def errors(variables: Any, collection: Any, args: tuple[Any, ...]) -> biases.Errors:
        traced = flax_models.trace(run, (variables, args))
        parameters = given_variables.parameters_in(traced, variables)
        names = {i: str(one) for i, one in parameters.items()}
        planned = plan.make(traced.jaxpr, (), names)
        states = _states_of(model, traced, variables)
        frozen = list(_frozen_operands(planned, parameters, collection, states))
        values = traced.values((variables, args))
        return biases.errors_of(traced.jaxpr, parameters, values, frozen)

    def of_batch(args: tuple[Any, ...]) -> biases.Errors:
        with given_variables.checked(variables):
            return errors(variables, changed.get(COLLECTION, {}), args)

    total = biases.mean_errors(of_batch, batches, (variables, changed))
    params = variables[PARAMETERS]
    for parameter in parameters_of(params, nn.meta.is_axis_metadata):
        if parameter.number in total:
            *path, name = parameter.path
            layer = statistics_uses.at(changed[PARAMETERS], tuple(path))
            bias = nn.meta.unbox(layer[name])
            corrected = (bias + total[parameter.number]).astype(bias.dtype)
            layer[name] = nn.meta.replace_boxed(layer[name], corrected)
    return changed


def _states_of(
    model: Model, traced: tracing.Traced, variables: Mapping[str, Any]
) -> dict[Location, tuple[str, ...]]:
    """Returns the paths of the states of contractions that rules quantize."""
    if not isinstance(model, QuantizedModel):
        return {}
    program = quantized_call.program_of(model, traced, variables)
    quantized = program.plan.quantized()
    return {one.site.location: program.place_of(one) for one in quantized}


def _frozen_operands(
    planned: plan.Plan,
    parameters: Mapping[int, Parameter],
    collection: Any,
    states: Mapping[Location, tuple[str, ...]],
) -> Iterator[biases.FrozenOperand]:
    """Yields the operands of float contractions of which one frozen weight is made.

    A weight is known by its parameters, its shape and its contracting axes, whoever
    quantized it: an injected function or a rule; and by its states, if it has any.
    """
    entries = list(frozen_entries(collection))
    for one in planned.contractions:
        operation, *types = one.types()
        for side, x in zip(SIDES, types, strict=True):
            place = one.index(side)
            inputs = one.site.operands[place].inputs
            if not inputs or not inputs <= parameters.keys():
                continue
            contracting = tuple(sorted(operation.axes(side).contracting))
            paths = [parameters[i].path for i in inputs]
            found = [
                entry
                for entry in entries
                if (entry.record.operand.shape, entry.record.operand.contracting)
                == (x.shape, contracting)
                and entry.record.state in ((), states.get(one.site.location))
                and len(entry.record.made_of) == len(paths)
                and all(entry.record.is_made_of(entry.module, path) for path in paths)
            ]
            if len(found) == 1:
                record, values = found[0].record, found[0].values
                qtensor = nn.meta.unbox(values[record.operand.side]).in_own_order()
                yield biases.FrozenOperand(one, place, qtensor, record.cfg)
