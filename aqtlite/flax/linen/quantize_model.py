"""Linen models whose contractions are quantized by rules."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax import core as flax_core
from flax import linen as nn

from aqtlite.flax.call import Call
from aqtlite.flax.linen import given_variables
from aqtlite.flax.linen.quantized_call import ModelByRules, TracedCall, merged
from aqtlite.program import rules
from aqtlite.program.plan import Plan
from aqtlite.quantization.state_collections import (
    OF_GRADIENTS,
    PARAMETERS,
    STATISTICS,
    collections_of,
)

_OURS = (PARAMETERS, STATISTICS, OF_GRADIENTS)
"""The collections of parameters, and of the states of calibrations."""

_METHODS = ("apply", "init", "init_with_output", "plan")


@dataclasses.dataclass(frozen=True)
class QuantizedModel(ModelByRules):
    """A Linen model with quantized contractions; see `quantize_model`.

    It has `init`, `init_with_output` and `apply` of a Linen module, with the same
    arguments and results. Other attributes are those of the model itself.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses to be called, as a module is inside of another one.

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
        """Returns the variables of the model, and the states of calibrations.

        Args:
            *args: as `flax.linen.Module.init` takes them.
            **kwargs: the same.
        """
        return self.init_with_output(*args, **kwargs)[1]

    def init_with_output(
        self, rngs: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the result of a call, quantized, and the variables."""
        mutable = kwargs.pop("mutable", flax_core.DenyList("intermediates"))
        variables = self.model.init(rngs, *args, mutable=mutable, **kwargs)
        variables = {k: flax_core.unfreeze(v) for k, v in variables.items()}
        # Other collections are made anew, as in the call that made them: in one that
        # finds a cache, attention takes a token at a time.
        given = {name: variables[name] for name in _OURS if name in variables}
        made = [name for name in variables if name not in _OURS]
        call = Call(*args, **kwargs, mutable=[*made, STATISTICS], rngs=rngs)
        if self.has_state:
            states = TracedCall.of(self, given, call).init_states()
            variables, given = merged(variables, states), merged(given, states)
        out, _ = self.apply(given, *call.args, **call.kwargs)
        return out, variables

    @property
    def has_state(self) -> bool:
        """True if a calibration of the rules gathers statistics or is learned."""
        cfgs = [rule.cfg for rule in self.rules if rule.cfg is not None]
        return any(bool(collections_of(cfg)) for cfg in cfgs)

    def apply(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the model, quantized.

        Args:
            variables: those of training, or what `aqtlite.flax.convert` made of them.
            *args: as `flax.linen.Module.apply` takes them.
            **kwargs: the same. Statistics are updated if "aqt_stats" is `mutable`.
                States that a mutable collection lacks are started first: learned
                scales, from float parameters and this call, if "params" is.
        """
        return self._started(variables, args, kwargs).run()

    def gather(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the model in float, and gathers statistics.

        Args:
            variables: those of training.
            *args: as `flax.linen.Module.apply` takes them.
            **kwargs: the same, "aqt_stats" being `mutable`. Statistics that are not
                there are started first.
        """
        return self._started(variables, args, kwargs).gather()

    def plan(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> Plan:
        """Decides about every contraction of a call, and runs nothing.

        Args:
            variables: variables of the model, or their shapes.
            *args: those of the call, or their shapes.
            **kwargs: the same.
        """
        return self._traced(variables, args, kwargs).program.plan

    def _started(
        self, variables: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> TracedCall:
        """Traces a call, and starts the states that mutable collections lack."""
        traced = self._traced(variables, args, kwargs)
        mutable = kwargs.get("mutable", False)
        made = [
            name
            for name in traced.lacking()
            if flax_core.scope.in_filter(mutable, name)
        ]
        if not made:
            return traced
        states = traced.init_states()
        states = {name: states[name] for name in made}
        variables = merged(states, given_variables.unfrozen(variables))
        return self._traced(variables, args, kwargs)

    def _traced(
        self, variables: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> TracedCall:
        variables = given_variables.unfrozen(variables)
        with given_variables.checked(variables):
            return TracedCall.of(self, variables, Call(*args, **kwargs))


Model = nn.Module | QuantizedModel
"""What can be called with variables, and converted."""


def quantize_model(
    model: nn.Module, rules: Any, *, strict: bool = False
) -> QuantizedModel:
    """Quantizes the contractions of a Linen model by rules; the model stays as it is.

    A call of the model is traced, and the traced program evaluated with those
    contractions replaced that rules name, as `aqtlite.quantize_function` does. Paths
    are those of the modules, behind the name of the class of the model, such as
    ``Transformer/Block_0/Dense_1``. Layers that have an `AqtDotGeneral` of their own
    keep it. Statistics, learned scales, and the weights that `convert` freezes are in
    the collections and under the paths that they have with `AqtDotGeneral`.

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
        rules: as `aqtlite.quantize_function` takes them.
        strict: raises if a contraction of floats stays in float though no rule says so.

    Returns:
        A model with `init`, `init_with_output`, `apply` and `plan`.

    Raises:
        TypeError: if `model` is no Linen module, or `rules` are none.
        ValueError: when it is called, if a rule matches nothing, if none quantizes
            anything (unless each has ``cfg=None``), and with `strict` if a contraction
            stays in float.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"quantize_model takes a flax.linen.Module, got {type(model).__name__}; "
            "aqtlite.quantize_function takes any function"
        )
    return QuantizedModel(model, _checked(rules), strict)


_checked = rules.check
