"""Quantizes the contractions of Linen models by rules, and plans their calls."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax import core as flax_core
from flax import linen as nn

from aqtlite.flax.call import Call
from aqtlite.flax.linen import caller, given_variables
from aqtlite.flax.linen.quantized_call import ModelByRules, TracedCall
from aqtlite.flax.linen.state_entries import merged
from aqtlite.program import contracted_in, injected
from aqtlite.program.plan import Plan
from aqtlite.program.rules import rules as rules_lib
from aqtlite.quantization.states.state_collections import (
    OF_GRADIENTS,
    PARAMETERS,
    STATISTICS,
)

_OURS = (PARAMETERS, STATISTICS, OF_GRADIENTS)
"""Collections of parameters and of calibration states."""

_METHODS = ("apply", "init", "init_with_output", "plan")


@dataclasses.dataclass(frozen=True)
class QuantizedModel(ModelByRules):
    """A Linen model with quantized contractions; see `quantize_model`.

    It has the methods `init`, `init_with_output` and `apply` of a Linen module, with
    equal signatures. Other attributes are those of the model.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses to be called as a submodule.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a quantized model is no module: call its `apply` with variables, and "
            "quantize the outermost model, by rules for those inside of it"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("bind", "tabulate", "lazy_init"):
            raise AttributeError(
                f"a quantized model has no {name!r}: it quantizes the calls of "
                f"{', '.join(_METHODS)}; call {name!r} of its `model`"
            )
        return getattr(self.model, name)

    def init(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns the variables of the model, with the states of calibrations.

        Args:
            *args: as in `flax.linen.Module.init`.
            **kwargs: as in `flax.linen.Module.init`.
        """
        return self.init_with_output(*args, **kwargs)[1]

    def init_with_output(
        self, rngs: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the result of a quantized call, and the variables."""
        mutable = kwargs.pop("mutable", flax_core.DenyList("intermediates"))
        variables = self.model.init(rngs, *args, mutable=mutable, **kwargs)
        variables = {k: flax_core.unfreeze(v) for k, v in variables.items()}
        # Other collections are created again: given an existing cache, attention would
        # take one token at a time.
        given = {name: variables[name] for name in _OURS if name in variables}
        made = [name for name in variables if name not in _OURS]
        call = Call(*args, **kwargs, mutable=[*made, STATISTICS], rngs=rngs)
        if self.has_state:
            states = TracedCall.of(self, given, call).init_states()
            variables, given = merged(variables, states), merged(given, states)
        out, _ = self.apply(given, *call.args, **call.kwargs)
        return out, variables

    def init_adapters(
        self, variables: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Returns the initial parameters of adapters, which leave all outputs as is.

        Nothing is run.

        Args:
            variables: variables of the model, float or converted, or their shapes.
            *args: as in `flax.linen.Module.apply`; shapes do.
            **kwargs: as `args`.

        Returns:
            Nested dictionaries, for `aqtlite.flax.with_adapters`.

        Raises:
            ValueError: if no rule has an adapter.
        """
        adapters = self.traced(variables, args, kwargs).init_adapters()
        if not adapters:
            raise ValueError(
                "no rule has an adapter: Rule(cfg=..., adapter=config.Lora(rank, "
                "alpha)) adds one to each contraction of a weight that it matches"
            )
        return adapters

    @property
    def has_state(self) -> bool:
        """Whether a rule has an adapter, or a calibration with a state."""
        return any(rule.has_state for rule in self.rules)

    def apply(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the quantized model.

        Args:
            variables: variables of training, or the result of `aqtlite.flax.convert`.
            *args: as in `flax.linen.Module.apply`.
            **kwargs: as in `flax.linen.Module.apply`. A key "aqt" in `rngs` seeds
                stochastic rounding, which is seeded from operands otherwise. Statistics
                are updated if "aqt_stats" is `mutable`. States missing from a mutable
                collection are initialized first; learned scales, if "params" is
                mutable, from this call's operands.
        """
        return self._started(variables, args, kwargs).run()

    def gather(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the model in float, and gathers statistics.

        Args:
            variables: variables of training.
            *args: as in `flax.linen.Module.apply`.
            **kwargs: as in `flax.linen.Module.apply`, with "aqt_stats" `mutable`.
                Missing statistics are initialized first.
        """
        return self._started(variables, args, kwargs).gather()

    def plan(
        self,
        variables: Mapping[str, Any],
        *args: Any,
        platform: str | None = None,
        **kwargs: Any,
    ) -> Plan:
        """Returns the decision about every contraction of a call, without running it.

        Args:
            variables: variables of the model, or their shapes.
            *args: arguments of the call, or their shapes.
            platform: as in `aqtlite.plan`.
            **kwargs: as `args`.
        """
        planned = self.traced(variables, args, kwargs).program.plan
        planned = planned.called_with((variables, args, kwargs))
        return contracted_in.on_platform(planned, platform)

    def _started(
        self, variables: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> TracedCall:
        """Traces a call, with states missing from mutable collections initialized."""
        traced = self.traced(variables, args, kwargs)
        mutable = kwargs.get("mutable", False)
        made = [
            name
            for name in traced.lacking()
            if flax_core.scope.in_filter(mutable, name)
        ]
        if not made:
            return traced
        traced.check_not_serving()
        states = traced.init_states()
        states = {name: states[name] for name in made}
        variables = merged(states, given_variables.unfrozen(variables))
        return self.traced(variables, args, kwargs)

    def traced(
        self, variables: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> TracedCall:
        """Traces a call, and plans its contractions."""
        variables = given_variables.unfrozen(variables)
        with given_variables.checked(variables):
            return TracedCall.of(self, variables, Call(*args, **kwargs))


Model = nn.Module | QuantizedModel
"""A model that can be called with variables, and converted."""


def check_model(model: Any, function: str) -> None:
    """Checks that a model is one of Linen.

    Args:
        model: argument of a function of `aqtlite.flax`.
        function: name of the function, for the message.

    Raises:
        TypeError: if it is not.
    """
    if not isinstance(model, Model):
        raise TypeError(
            f"{function} takes a flax.linen.Module, got {type(model).__name__}; "
            f"aqtlite.flax.nnx.{function} takes NNX modules"
        )


def quantize_model(
    model: nn.Module, rules: Any, *, strict: bool = False, invariant: bool = False
) -> QuantizedModel:
    """Quantizes the contractions of a Linen model by rules, without changing the model.

    A call of the model is traced, and its program evaluated with the contractions that
    rules match replaced, as by `aqtlite.quantize_function`. Paths consist of the name
    of the model's class and those of the modules, such as
    ``Transformer/Block_0/Dense_1``. Layers with an `AqtDotGeneral` of their own keep
    it. Statistics, learned scales and frozen weights are in the same collections, under
    the same paths, as with `AqtDotGeneral`.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from aqtlite import config
    >>> from aqtlite.flax import convert
    >>> model = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(2)])
    >>> quantized = quantize_model(model, config.fully_quantized())
    >>> x = jnp.ones((4, 3))
    >>> variables = quantized.init(jax.random.key(0), x)
    >>> [one.path for one in quantized.plan(variables, x).quantized()]
    ['Sequential/layers_0', 'Sequential/layers_2']
    >>> serving = convert(quantized, variables, x)
    >>> bool((quantized.apply(serving, x) == quantized.apply(variables, x)).all())
    True

    Args:
        model: any Linen module.
        rules: as in `aqtlite.quantize_function`.
        strict: raise if a contraction of floats stays in float without a rule that says
            so.
        invariant: as in `aqtlite.quantize_function`.

    Returns:
        A model with `init`, `init_with_output`, `apply` and `plan`.

    Raises:
        TypeError: if `model` is not a Linen module, or quantized already, or if `rules`
            has another type.
        ValueError: when the result is called, if a required rule matches nothing, if
            nothing is quantized (unless each rule has ``cfg=None``, or matches nothing
            and is not required), with `strict` if a contraction stays in float, and
            with `invariant` if `aqtlite.invariant` refuses an operation.
    """
    if isinstance(model, QuantizedModel):
        raise TypeError(
            "the model is quantized already, by quantize_model: give all rules at "
            "once, to quantize_model(quantized.model, rules)"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"quantize_model takes a flax.linen.Module, got {type(model).__name__}; "
            "aqtlite.flax.nnx.quantize_model takes NNX modules, and "
            "aqtlite.quantize_function any function"
        )
    return QuantizedModel(model, rules_lib.check(rules), strict, invariant)


def plan(
    model: Model,
    variables: Mapping[str, Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Plan:
    """Returns the decision about every contraction of a call, injected ones included.

    Nothing is run.

    Args:
        model: any Linen module, or the result of `quantize_model`.
        variables: variables of the model, or their shapes.
        args: positional arguments of the call, or their shapes.
        kwargs: keyword arguments of the call, or their shapes.
    """
    if not isinstance(model, QuantizedModel):
        model = QuantizedModel(model, ())
    with caller.in_float(), injected.marking():
        return model.plan(variables, *args, **kwargs)
