"""Models and functions whose contractions are measured, as functions of arrays."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from flax import nnx

from aqtlite.flax.linen import caller, given_variables
from aqtlite.flax.linen.quantize_model import QuantizedModel
from aqtlite.flax.nnx.calls import function_of
from aqtlite.flax.nnx.pure import PureCall
from aqtlite.flax.nnx.quantize import as_quantized
from aqtlite.invariance import transform
from aqtlite.jaxpr import rewriting
from aqtlite.jaxpr.replacement import Evaluate
from aqtlite.program import injected
from aqtlite.program.naming import by_scope
from aqtlite.program.quantize import QuantizedFunction, quantize_function
from aqtlite.program.rules.rules import Rule
from aqtlite.program.serving.frozen_record import COLLECTION
from aqtlite.quantization.states.state_collections import PARAMETERS


class Call(NamedTuple):
    """A call of the model or function that is measured."""

    function: QuantizedFunction
    """The call in float, as a function with the variables as first argument."""

    args: tuple[Any, ...]
    """Arguments of the function, variables included."""

    result: Callable[[Any], Any]
    """Function from what the function returns to the result of the model."""

    others: Any = ()
    """Variables of the model that are not in the first argument."""

    @property
    def evaluate(self) -> Evaluate:
        """Function that evaluates the program of the call."""
        return (transform if self.function.invariant else rewriting).evaluate


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model or function, with its variables."""

    call: Callable[[tuple[Any, ...]], Call]
    """Function from the inputs of the model to the call."""

    rules: tuple[Rule, ...]
    """The rules that quantize it; empty for a float model."""

    variables: Any
    """A pytree of its arrays."""


def subject_of(model: Any, variables: Any, kwargs: Mapping[str, Any]) -> Subject:
    """Returns a model with its variables.

    Args:
        model: a Linen or NNX model, a function, or one of these quantized by rules.
        variables: variables of the model, or first argument of the function; None for
            an NNX model, which holds its own.
        kwargs: keyword arguments of all calls.

    Raises:
        TypeError: if `model` is none of these, or has no or superfluous variables.
        ValueError: if the model is converted already.
    """
    if isinstance(model, nnx.Module):
        return _of_nnx(model, variables, dict(kwargs))
    if variables is None:
        raise TypeError(
            "variables is None, which is for NNX models, since they hold their own: "
            f"give those of the {type(model).__name__}, or the first argument of the "
            "function"
        )
    if isinstance(model, nn.Module | QuantizedModel):
        return _of_linen(model, variables, kwargs)
    if isinstance(model, QuantizedFunction):
        if model.params != 0 and not callable(model.params):
            raise ValueError(
                f"the function was quantized with params={model.params!r}, and its "
                "first argument is what is measured: quantize it with params=0"
            )
        function = model
    elif hasattr(model, "apply"):
        function = quantize_function(model.apply, (), params=0)
    elif callable(model):
        function = quantize_function(model, (), params=0)
    else:
        raise TypeError(
            "the first argument is a Linen or NNX model or a function, got "
            f"{type(model).__name__}"
        )
    if kwargs:
        called = functools.partial(function.function, **kwargs)
        function = dataclasses.replace(function, function=called)
    return Subject(
        lambda inputs: Call(function, (variables, *inputs), lambda out: out),
        function.rules,
        variables,
    )


def _of_linen(model: Any, variables: Any, kwargs: Mapping[str, Any]) -> Subject:
    variables = given_variables.unfrozen(variables)
    if jax.tree.leaves(variables.get(COLLECTION, {})):
        raise ValueError(_CONVERTED)
    is_by_rules = isinstance(model, QuantizedModel)
    module = model.model if is_by_rules else model

    def apply(variables: Any, *args: Any) -> Any:
        with caller.in_float(), injected.marking(), given_variables.checked(variables):
            return module.apply(variables, *args, **kwargs)

    rules = model.rules if is_by_rules else ()
    function = QuantizedFunction(
        apply,
        rules,
        _is_in_params,
        naming=by_scope,
        invariant=is_by_rules and model.invariant,
    )
    return Subject(
        lambda inputs: Call(function, (variables, *inputs), lambda out: out),
        rules,
        variables,
    )


def _is_in_params(path: str) -> bool:
    return path.startswith(f"0/{PARAMETERS}/")


def _of_nnx(model: nnx.Module, variables: Any, kwargs: dict[str, Any]) -> Subject:
    if variables is not None:
        raise TypeError("an NNX model holds its variables: give variables=None")
    quantized = as_quantized(model)
    if quantized.aqt.frozen:
        raise ValueError(_CONVERTED)
    method = kwargs.pop("method", "__call__")

    def call(inputs: tuple[Any, ...]) -> Call:
        one = PureCall(quantized, method, inputs, kwargs)
        function = function_of(quantized, one)
        _, others, *_ = one.arguments
        return Call(function, one.arguments, lambda out: one.result(out[0]), others)

    return Subject(call, quantized.aqt.rules, nnx.state(quantized))


_CONVERTED = (
    "the model is converted already, and its weights are integers: give the float "
    "variables of training"
)
