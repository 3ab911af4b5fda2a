"""Quantized functions of any functions, by rules."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from aqtlite import config, statistics
from aqtlite.functions import plan as planning
from aqtlite.functions import primitives
from aqtlite.functions import rules as rules_lib
from aqtlite.functions.naming import Naming, by_scope
from aqtlite.functions.plan import Plan, PlannedContraction
from aqtlite.functions.rules import Rule
from aqtlite.jaxpr import rewriting, tracing
from aqtlite.state_collections import (
    OF_GRADIENTS,
    PARAMETERS,
    STATISTICS,
    collections_of,
)
from aqtlite.statistics import States

Parameters = int | Sequence[int] | Callable[[str], bool] | None

State = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By collection, path of the contraction, and field of `statistics.States`."""


@dataclasses.dataclass(frozen=True)
class QuantizedFunction:
    """A function whose contractions are quantized by rules; see `quantize_function`."""

    function: Callable[..., Any]
    rules: tuple[Rule, ...]
    params: Parameters = None
    strict: bool = False
    naming: Naming = by_scope
    """Gives the paths of contractions."""

    __name__: str = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        object.__setattr__(self, "__name__", name)

    @property
    def has_state(self) -> bool:
        """True if a calibration of the rules gathers statistics or is learned."""
        return any(
            bool(collections_of(rule.cfg))
            for rule in self.rules
            if rule.cfg is not None
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function, quantized.

        With a state, it is the first argument, and the result is a pair: that of the
        function, and the state with the statistics of this call.
        """
        if not self.has_state:
            out, _ = self.run({}, args, kwargs)
            return out
        if not args or not _is_state(args[0]):
            raise TypeError(
                "a calibration of the rules has a state: call the quantized function "
                "as f(state, *args), with the state that f.init_state(*args) returns, "
                "and take its result apart as (out, state)"
            )
        state, *rest = args
        return self.run(state, tuple(rest), kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """Decides about every contraction, and runs nothing.

        Args:
            *args: those of the function; `jax.ShapeDtypeStruct`s may stand for arrays.
            **kwargs: the same.
        """
        return self.traced(args, kwargs)[1]

    def init_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns the state before the first call.

        Args:
            *args: those of the function. Learned scales start from their values; in a
                branch that these do not take, as if there were zeros.
            **kwargs: the same.

        Raises:
            ValueError: if the statistics of a gradient or a learned scale would not get
                theirs where the contraction is.
        """

        def init(values: list[Any]) -> Any:
            replacements = {
                one.site.location: initializing(one)
                for one in planned.quantized()
                if collections_of(one.cfg)
            }
            return rewriting.evaluate(traced.jaxpr, values, replacements)[1]

        traced, planned = self.traced(args, kwargs)
        left = jax.jit(init)(traced.values((args, kwargs)))
        state: dict[str, Any] = {}
        for one in planned.quantized():
            for collection, fields in collections_of(one.cfg).items():
                states = left[one.site.location]
                entry = {field: getattr(states, field) for field in fields}
                state.setdefault(collection, {})[one.path] = entry
        return state

    def run(
        self, state: State, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Calls the function, quantized, and gathers statistics of the call.

        Args:
            state: of its calibrations; empty if there is none.
            args: those of the function.
            kwargs: the same.

        Returns:
            Its result, and the state with the statistics of this call.
        """
        out, planned, left = self._evaluate(state, args, kwargs, updating)
        return out, _updated(state, planned, left)

    def evaluate(
        self, state: State, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls the function, quantized, with the statistics as they are.

        Args:
            state: of its calibrations; empty if there is none.
            args: those of the function.
            kwargs: the same.
        """
        return self._evaluate(state, args, kwargs, contracting)[0]

    def _evaluate(
        self,
        state: State,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        how: Callable[[PlannedContraction, States], rewriting.Replacement],
    ) -> tuple[Any, Plan, rewriting.Left]:
        traced, planned = self.traced(args, kwargs)
        replacements = {
            one.site.location: how(one, states_of(one, state))
            for one in planned.quantized()
        }
        values = traced.values((args, kwargs))
        outputs, left = rewriting.evaluate(traced.jaxpr, values, replacements)
        # Constants of the program are no arrays.
        out = jax.tree.map(lambda i: jnp.asarray(outputs[i]), traced.outputs)
        return out, planned, left

    def traced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tracing.Traced, Plan]:
        """Traces a call, and decides about every contraction."""
        traced = tracing.trace(
            lambda args, kwargs: self.function(*args, **kwargs), (args, kwargs)
        )
        parameters = _parameters(self.params, traced, args, kwargs)
        planned = planning.make(traced.jaxpr, self.rules, parameters, self.naming)
        report(planned, strict=self.strict)
        return traced, planned


def quantize_function(
    fn: Callable[..., Any],
    rules: Any,
    *,
    params: Parameters = None,
    strict: bool = False,
) -> QuantizedFunction:
    """Quantizes the contractions of any function, by rules.

    The function is traced, and the traced program evaluated with the contractions that
    rules name (`jax.lax.dot_general`, `conv_general_dilated`, `ragged_dot`) replaced by
    quantized ones with their gradients. All other operations stay as they are, in
    loops, branches, `jax.jit`, `jax.checkpoint`, `jax.shard_map`, and functions with
    derivatives of their own, too. The result is an ordinary function, to be compiled,
    differentiated, mapped or exported like any other; it traces `fn` at every call, so
    that it is to be called inside of a `jax.jit`.

    Contractions that were quantized where they are called, by `make_dot_general` or
    `aqtlite.flax.AqtDotGeneral`, stay as they are.

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
        fn: takes and returns pytrees of arrays.
        rules: a sequence of `Rule`, the first that fits decides; or a config, for
            every contraction.
        params: which arguments are parameters: the position of one, several of them,
            or a function that is told the path of a leaf of the arguments, such as
            "0/encoder/kernel", and says whether it is. An operand that depends on
            parameters alone is a weight. None: there are none.
        strict: raises if a contraction of floats stays in float though no rule says so.

    Returns:
        A function like `fn`. If a calibration of the rules gathers statistics or is
        learned, it is ``quantized(state, *args) -> (out, state)``, and
        ``quantized.init_state(*args)`` makes the state, by collections: "aqt_stats"
        holds statistics, "params" what is learned and to be trained, and
        "_overwrite_with_gradient" statistics of gradients, whose gradient is what takes
        their place (`with_gradient_statistics`).

    Raises:
        TypeError: if `rules` are none.
        ValueError: when it is called, if a rule matches nothing, and with `strict` if
            a contraction stays in float.
    """
    if not callable(fn):
        raise TypeError(f"quantize_function takes a function, got {fn!r}")
    if params is not None and not callable(params) and not isinstance(params, int):
        params = tuple(params)
    return QuantizedFunction(fn, rules_lib.check(rules), params, strict)


def plan(
    fn: Any, *args: Any, rules: Any, params: Parameters = None, **kwargs: Any
) -> Plan:
    """Shows what rules make of a function or a model, before anything runs.

    >>> model = lambda w, x: x @ w
    >>> print(plan(model, jnp.ones((4, 8)), jnp.ones((2, 4)), rules=[], params=0))
    ... # doctest: +NORMALIZE_WHITESPACE
                       1 contractions: 0 quantized, 1 in float
    <BLANKLINE>
      path              op           lhs                       rhs   ...

    Args:
        fn: a function; or a model that has `apply`, as those of Linen and Haiku have,
            which is called with its variables first.
        *args: its arguments; `jax.ShapeDtypeStruct`s may stand for arrays.
        rules: as `quantize_function` takes them.
        params: as `quantize_function` takes it. None: for a model, its parameters.
        **kwargs: as `args`.

    Raises:
        TypeError: if `rules` are none.
        ValueError: if a rule matches nothing.
    """
    if hasattr(fn, "apply"):
        fn = fn.apply
        if params is None:
            is_linen = (
                bool(args) and isinstance(args[0], Mapping) and "params" in args[0]
            )
            params = _is_in_params if is_linen else 0
    return quantize_function(fn, rules, params=params).plan(*args, **kwargs)


def _is_in_params(path: str) -> bool:
    """Tells whether a leaf of the arguments is a parameter of a Linen model."""
    return path.startswith("0/params/")


def with_gradient_statistics(state: State, gradient: State) -> dict[str, Any]:
    """Puts new statistics of output gradients into a state.

    Args:
        state: that the quantized function returned.
        gradient: of the state, as `jax.grad` gives it.
    """
    return {**state, OF_GRADIENTS: gradient[OF_GRADIENTS]}


def _is_state(x: Any) -> bool:
    return isinstance(x, Mapping)


def initializing(one: PlannedContraction) -> rewriting.Replacement:
    """Evaluates a contraction in float, and leaves its first states.

    Raises:
        ValueError: if one of them would not get its gradient.
    """

    def function(values: Sequence[Any], given: States) -> tuple[Sequence[Any], States]:
        del given
        return _original(one.site.eqn, values), _first_states(one, values)

    _check_gradients(one)
    return rewriting.Replacement(
        function, _states_of_zeros(one), leaves=True, per_step=one.site.per_step
    )


def _check_gradients(one: PlannedContraction) -> None:
    """Raises if a state of a contraction would not get its gradient."""
    has = {PARAMETERS, OF_GRADIENTS} & set(collections_of(one.cfg))
    around = one.site.around
    if has and {"custom_jvp_call", "custom_vjp_call"} & set(around):
        where = "a function with a derivative of its own, which gives them none"
    elif OF_GRADIENTS in has and "cond" in around:
        where = "a branch, which gives zeros for them where it is not taken"
    elif OF_GRADIENTS in has and not all(one.site.per_step):
        where = "a scan whose steps share parameters, which adds theirs up"
    else:
        return
    raise ValueError(
        f"the config of {one.path!r} has a learned calibration, or statistics of "
        f"gradients, and the contraction is inside {where}: name it in a rule before "
        "the others, with a config that has none"
    )


def _first_states(one: PlannedContraction, values: Sequence[Any]) -> States:
    lhs, rhs, *_ = one.in_order(values)
    operation = primitives.operation_of(
        one.site.eqn, values, exchanged=one.is_exchanged
    )
    return statistics.init_states(one.cfg, lhs, rhs, operation)


def _states_of_zeros(one: PlannedContraction) -> States:
    """The first states of a contraction that is not evaluated, for all its steps."""
    avals = [atom.aval for atom in one.site.eqn.invars]
    states = _first_states(one, [jnp.zeros(x.shape, x.dtype) for x in avals])
    steps = tuple(itertools.compress(one.site.lengths, one.site.per_step))
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (*steps, *jnp.shape(x))), states)


def contracting(one: PlannedContraction, states: States) -> rewriting.Replacement:
    """Evaluates a contraction quantized, by states that stay as they are."""

    def function(values: Sequence[Any], states: States) -> tuple[Sequence[Any], None]:
        return _contract(one, values, states), None

    return rewriting.Replacement(function, states, per_step=one.site.per_step)


def updating(one: PlannedContraction, states: States) -> rewriting.Replacement:
    """Evaluates a contraction quantized, and leaves its states with this batch."""

    def function(values: Sequence[Any], states: States) -> tuple[Sequence[Any], States]:
        eqn = one.site.eqn
        lhs, rhs, *_ = one.in_order(values)
        operation = primitives.operation_of(eqn, values, exchanged=one.is_exchanged)
        after = statistics.update_states(one.cfg, states, lhs, rhs, operation)
        return _contract(one, values, after), after

    if STATISTICS not in collections_of(one.cfg):
        return contracting(one, states)
    return rewriting.Replacement(
        function, states, leaves=True, per_step=one.site.per_step
    )


def _contract(
    one: PlannedContraction, values: Sequence[Any], states: States
) -> list[jax.Array]:
    ordered = one.in_order(values)
    eqn, exchanged = one.site.eqn, one.is_exchanged
    return [primitives.contract(eqn, one.cfg, ordered, states, exchanged=exchanged)]


def _original(eqn: Any, values: Sequence[Any]) -> list[jax.Array]:
    """Evaluates a contraction as it was."""
    float_cfg = config.unquantized()
    return [primitives.contract(eqn, float_cfg, values, States(), exchanged=False)]


def states_of(one: PlannedContraction, state: State) -> States:
    """The states of a contraction, taken from the state of a function.

    Raises:
        ValueError: if it has none there.
    """
    found: dict[str, Any] = {}
    for collection, fields in collections_of(one.cfg).items():
        entry = state.get(collection, {}).get(one.path)
        if entry is None or set(fields) - set(entry):
            raise ValueError(
                f"the state has nothing for the contraction {one.path!r} in "
                f"{collection!r}: make it with init_state and the arguments, rules and "
                "function of the call"
            )
        found.update({field: entry[field] for field in fields})
    return States(**found)


def _updated(state: State, planned: Plan, left: rewriting.Left) -> dict[str, Any]:
    """The state with the statistics that contractions left."""
    after = {name: dict(entries) for name, entries in state.items()}
    for one in planned.quantized():
        fields = collections_of(one.cfg).get(STATISTICS)
        if fields:
            states = left[one.site.location]
            after[STATISTICS][one.path] = {f: getattr(states, f) for f in fields}
    return after


def _parameters(
    params: Parameters,
    traced: tracing.Traced,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[int, str]:
    """The names of the inputs of a jaxpr that are parameters, by index."""
    if params is None:
        return {}
    if callable(params):
        is_parameter = params
    else:
        positions = (params,) if isinstance(params, int) else tuple(params)
        wrong = [i for i in positions if not -len(args) <= i < len(args)]
        if wrong:
            raise ValueError(
                f"params={params!r} names the argument {wrong[0]}, and the function "
                f"was called with {len(args)} positional arguments"
            )
        heads = {str(i % len(args)) for i in positions}

        def is_parameter(path: str) -> bool:
            return path.partition("/")[0] in heads

    flat = jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
    paths = [jax.tree_util.keystr(p[1:], simple=True, separator="/") for p, _ in flat]
    return {
        i: paths[leaf]
        for i, leaf in enumerate(traced.leaves)
        if is_parameter(paths[leaf])
    }


def report(planned: Plan, *, strict: bool) -> None:
    """Says what stays in float against the rules' will.

    Raises:
        ValueError: with `strict`, if there is something; for a contraction that was
            given a config where it is called.
    """
    for one in planned.left_float():
        if one.is_injected:
            raise ValueError(
                f"the contraction {one.path!r} was given a config where it is called, "
                f"and cannot be quantized: {one.why_float}"
            )
    left = [
        one
        for one in planned.left_float()
        if _is_float(one)
        and (one.rule is None or planned.rules[one.rule].cfg is not None)
    ]
    if strict and left:
        lines = [f"  {one.path or '(no name scope)'}: {one.why_float}" for one in left]
        raise ValueError(
            f"strict=True, and {len(left)} contractions stay in float:\n"
            + "\n".join(lines)
            + "\nName those that are to stay so with Rule(path=..., cfg=None)"
        )
    for one in left:
        if one.rule is not None:
            logging.warning("%r stays in float: %s", one.path, one.why_float)


def _is_float(one: PlannedContraction) -> bool:
    return all(jnp.issubdtype(x.dtype, jnp.floating) for x in (one.lhs, one.rhs))
