"""Quantizes the contractions of any function by rules."""

import dataclasses
from collections.abc import Callable
from typing import Any

from aqtlite import errors
from aqtlite.calibration import masks as masks_lib
from aqtlite.jaxpr import tracing
from aqtlite.jaxpr.replacement import Aux, Replacement
from aqtlite.program import calibration_state as states_lib
from aqtlite.program import contracted_in, plan_checks
from aqtlite.program import plan as planning
from aqtlite.program.adapters import adapter_init
from aqtlite.program.calibration_state import State
from aqtlite.program.masking import gathering as masking
from aqtlite.program.modules import flax_models
from aqtlite.program.naming import (
    Naming,
    Parameters,
    Paths,
    by_scope,
    names_of_parameters,
    naming_of,
    positions_of,
)
from aqtlite.program.plan import Plan
from aqtlite.program.planned_lookup import Planned
from aqtlite.program.planned_operation import PlannedOperation
from aqtlite.program.program import Program
from aqtlite.program.rules import rules as rules_lib
from aqtlite.program.rules.rules import Rule
from aqtlite.program.serving import frozen_parameter, guards
from aqtlite.quantization.states.state_collections import DROPOUT
from aqtlite.quantization.states.statistics import States


@dataclasses.dataclass(frozen=True, repr=False)
class QuantizedFunction:
    """A function whose contractions are quantized by rules; see `quantize_function`."""

    function: Callable[..., Any]
    rules: tuple[Rule, ...]
    params: Parameters = None
    strict: bool = False
    naming: Naming = by_scope
    """Function that gives contractions their paths."""

    invariant: bool = False
    """Whether bits depend on values alone, as by `aqtlite.invariant`."""

    __name__: str = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        object.__setattr__(self, "__name__", name)

    def __repr__(self) -> str:
        # JAX's messages about arguments name the function so.
        count = len(self.rules)
        return f"QuantizedFunction({self.__name__}, {count} rule{'s' * (count != 1)})"

    @property
    def has_state(self) -> bool:
        """Whether a rule has an adapter, or a calibration with a state."""
        return any(rule.has_state for rule in self.rules)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the quantized function.

        If `has_state`, or if the first argument is a state of `init_state` that is not
        empty, the result is a pair: the function's result, and the state updated with
        the statistics of this call.

        Raises:
            TypeError: if the state is missing, or arguments are serving parameters.
        """
        frozen_parameter.check_none(self.__name__, (args, kwargs))
        is_given = bool(args) and states_lib.is_state(args[0])
        # Contractions that a framework injects have calibrations of their own.
        is_filled = is_given and states_lib.is_filled(args[0])
        if not self.has_state and not is_filled:
            out, _ = self.run({}, args, kwargs)
            return out
        if not is_given:
            raise TypeError(
                "a calibration of the rules has a state: call the quantized function "
                "as f(state, *args), with the state that f.init_state(*args) returns, "
                "and take its result apart as (out, state)"
            )
        state, *rest = args
        return self.run(state, tuple(rest), kwargs)

    def plan(self, *args: Any, platform: str | None = None, **kwargs: Any) -> Plan:
        """Returns the decision about every contraction, without running anything.

        Args:
            *args: arguments of the function, or `jax.ShapeDtypeStruct`s for arrays.
            platform: as in `aqtlite.plan`.
            **kwargs: as `args`.
        """
        planned = self.program({}, args, kwargs).plan.called_with((args, kwargs))
        return contracted_in.on_platform(planned, platform)

    def init_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns the state before the first call.

        Args:
            *args: arguments of the function. Learned scales start from their values;
                in a branch not taken, as if all values were zero.
            **kwargs: as `args`.

        Raises:
            ValueError: if a contraction is where a learned scale, or statistics of
                gradients, would not get the right gradient.
        """
        program = self.program({}, args, kwargs)
        values = program.traced.values((args, kwargs))
        adapter_init.check_keeps_weights(
            program, "aqtlite.with_initial_adapters(fn, params, *args)"
        )
        started = adapter_init.start(program, values, {}, guards.FUNCTION)
        return states_lib.first(program, values, started.adapters)

    def run(
        self, state: State, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Calls the quantized function and gathers statistics.

        Args:
            state: state of the calibrations; empty if there is none.
            args: positional arguments of the function.
            kwargs: keyword arguments of the function.

        Returns:
            The result, and the state updated with the statistics of this call.
        """
        if not states_lib.is_filled(state):
            return self.evaluate(state, args, kwargs), dict(state)
        out, planned, aux = self._evaluate(state, args, kwargs, states_lib.updating)
        return out, states_lib.updated(state, planned, aux)

    def gather(self, state: State, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Gathers the statistics of a call with all contractions in float.

        Every contraction sees the activations of the float function, so its statistics
        do not depend on other contractions' scales: statistics gathered in parts and
        merged equal those of one pass.

        >>> import jax.numpy as jnp
        >>> from aqtlite import config
        >>> quantized = quantize_function(jnp.matmul, config.static_int8())
        >>> x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
        >>> state = quantized.gather(quantized.init_state(x, w), x, w)
        >>> [contraction] = state["aqt_stats"].values()
        >>> contraction["lhs"].batches.item()
        1.0

        Args:
            state: state of the calibrations.
            *args: positional arguments of the function.
            **kwargs: keyword arguments of the function.

        Returns:
            The state updated with the statistics of this call.

        Raises:
            TypeError: if `state` is not a state, as where arguments come before it.
        """
        if not states_lib.is_state(state):
            raise TypeError(
                "gather(state, *args) takes a state that init_state(*args) or gather "
                f"returned, before the function's arguments; got {errors.brief(state)}"
            )
        _, planned, aux = self._evaluate(state, args, kwargs, states_lib.gathering)
        return states_lib.updated(state, planned, aux)

    def gather_counted(
        self, mask: Any, state: State, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Gathers the statistics of the tokens that count, as `gather` does of all.

        >>> import jax.numpy as jnp
        >>> from aqtlite import config
        >>> quantized = quantize_function(jnp.matmul, config.static_int8("max"))
        >>> x, w = jnp.array([[1.0, 2.0], [9.0, 9.0]]), jnp.ones((2, 4))
        >>> state, mask = quantized.init_state(x, w), jnp.array([True, False])
        >>> state = quantized.gather_counted(mask, state, x, w)
        >>> [contraction] = state["aqt_stats"].values()
        >>> contraction["lhs"].state["ends"]["high"].item()
        2.0

        Args:
            mask: bool array, True for tokens that count, for all arrays whose leading
                axes have its shape; or a tuple, as for `aqtlite.flax.calibrate`.
            state: as in `gather`.
            *args: positional arguments of the function.
            **kwargs: keyword arguments of the function, of which all elements count.

        Raises:
            TypeError: if `state` is not a state, or a mask is not of bool.
            ValueError: if a mask does not fit, as for `aqtlite.flax.calibrate`, or if
                outside of `jax.jit` no token counts in an array.
        """

        def update(state: State, kwargs: Any, args: Any) -> dict[str, Any]:
            return self.gather(state, *args, **kwargs)

        masks = masks_lib.of_leaves(mask, args)
        after: dict[str, Any] = masking.of_one(update, (state, kwargs, args), masks)
        return after

    def evaluate(
        self, state: State, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls the quantized function without updating statistics.

        Args:
            state: state of the calibrations; empty if there is none.
            args: positional arguments of the function.
            kwargs: keyword arguments of the function.
        """
        return self._evaluate(state, args, kwargs, PlannedOperation.replacement)[0]

    def _evaluate(
        self,
        state: State,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        how: Callable[[Planned, States], Replacement],
    ) -> tuple[Any, Plan, Aux]:
        program = self.program(state, args, kwargs)
        values = program.traced.values((args, kwargs))
        outputs, aux = program.evaluate(values, how)
        return program.traced.result(outputs), program.plan, aux

    def program(
        self, state: State, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Program:
        """Traces a call and plans its contractions.

        Args:
            state: state of the calibrations; empty if there is none.
            args: positional arguments of the function, or their shapes.
            kwargs: keyword arguments of the function, or their shapes.
        """
        traced = self.trace(args, kwargs)
        parameters = names_of_parameters(self.params, traced, args, kwargs)
        planned = planning.make(traced.jaxpr, self.rules, parameters, self.naming)
        plan_checks.report(planned, strict=self.strict)
        if self.invariant:
            planned = planned.invariant(traced.jaxpr)
        return Program(
            traced,
            planned,
            parameters={},
            module_of=lambda one: tuple(filter(None, one.kept_under.split("/"))),
            state=state,
            states_in=states_lib.states_of,
            place_of=lambda one: (one.kept_as,),
            dropout=state.get(DROPOUT),
        )

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tracing.Traced:
        """Traces a call."""
        return flax_models.trace(
            lambda args, kwargs: self.function(*args, **kwargs), (args, kwargs)
        )


def quantize_function(
    fn: Callable[..., Any],
    rules: Any,
    *,
    params: Parameters = None,
    strict: bool = False,
    paths: Paths = "scopes",
    invariant: bool = False,
) -> QuantizedFunction:
    """Quantizes the contractions of any function by rules.

    The function is traced, and its program evaluated with the contractions that rules
    match (`jax.lax.dot_general`, `conv_general_dilated`, `ragged_dot`) replaced by
    quantized ones, with the gradients that their configs define. This includes
    contractions inside loops, branches, `jax.jit`, `jax.checkpoint`, `jax.shard_map`
    and functions with custom derivatives. All other operations are unchanged. The
    result is an ordinary function that can be compiled, differentiated, mapped or
    exported; it traces `fn` at every call, so call it inside a `jax.jit`.

    Contractions that are already quantized, by `make_dot_general` or
    `aqtlite.flax.AqtDotGeneral`, are unchanged.

    >>> import jax, jax.numpy as jnp
    >>> from aqtlite import config
    >>> def mlp(params, x):
    ...     for i, w in enumerate(params):
    ...         with jax.named_scope(f"layer_{i}"):
    ...             x = jnp.tanh(x @ w)
    ...     return x
    >>> quantized = quantize_function(
    ...     mlp, [Rule(path="layer_.*", cfg=config.fully_quantized())], params=0
    ... )
    >>> params = [jnp.ones((4, 8)), jnp.ones((8, 2))]
    >>> jax.jit(quantized)(params, jnp.ones((3, 4))).shape
    (3, 2)
    >>> [one.path for one in quantized.plan(params, jnp.ones((3, 4))).quantized()]
    ['layer_0', 'layer_1']

    Args:
        fn: function of pytrees of arrays.
        rules: sequence of `Rule`, of which the first match decides; or a config for
            every contraction.
        params: the arguments that are parameters: one position, a sequence of
            positions, or a predicate on the path of a leaf of the arguments, such as
            "0/encoder/kernel". An operand that depends only on parameters is a weight.
            None: no argument is.
        strict: raise if a contraction of floats stays in float without a rule that says
            so.
        paths: the paths that rules match. "scopes": the name scopes around a
            contraction; without any, as "parameters". (Scopes that Equinox adds for
            classes, and `jnp.einsum` for equations, do not count.) "parameters": the
            path of the contracted parameter, such as "layers/0/weight"; for a
            contraction of activations, the innermost node around the nearest weights
            before and after it, followed by its scopes.
        invariant: compute each result from values alone, bit for bit, as
            `aqtlite.invariant` does: in training, calibration, conversion and serving.

    Returns:
        A function like `fn`. If a calibration of the rules gathers statistics or is
        learned, it is ``quantized(state, *args) -> (out, state)``, and
        ``quantized.init_state(*args)`` returns the initial state, a dictionary of
        collections: "aqt_stats" holds statistics, "params" adapters and learned values
        to train ("dropout" may hold a key for the dropout of adapters), and
        "_overwrite_with_gradient" statistics of gradients, to be replaced by their own
        gradient (`with_gradient_statistics`).

    Raises:
        TypeError: if `fn` is a model or not callable, or if `rules` or `params` has
            another type.
        ValueError: if `paths` is unknown; when the result is called, if a required rule
            matches nothing, if nothing is quantized (unless each rule has ``cfg=None``,
            or matches nothing and is not required), with `strict` if a contraction
            stays in float, and with `invariant` if `aqtlite.invariant` refuses an
            operation.
    """
    if hasattr(fn, "init") and hasattr(fn, "apply"):
        raise TypeError(
            f"quantize_function takes a function, got the model {type(fn).__name__}: "
            "give its apply, with params=0; Linen has aqtlite.flax.quantize_model"
        )
    if flax_models.is_nnx(fn):
        raise TypeError(
            "quantize_function takes a function, got the NNX model "
            f"{type(fn).__name__}, whose parameters would be constants of the "
            "program: aqtlite.flax.nnx.quantize_model takes it"
        )
    if not callable(fn):
        raise TypeError(f"quantize_function takes a function, got {errors.brief(fn)}")
    checked, positions = rules_lib.check(rules), positions_of(params)
    return QuantizedFunction(
        fn, checked, positions, strict, naming_of(paths), invariant
    )
