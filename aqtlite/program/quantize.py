"""Quantized functions of any functions, by rules."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from aqtlite.jaxpr import tracing
from aqtlite.jaxpr.replacement import Aux, Replacement
from aqtlite.program import calibration_state as states_lib
from aqtlite.program import plan as planning
from aqtlite.program import rules as rules_lib
from aqtlite.program.calibration_state import State
from aqtlite.program.naming import Naming, Paths, by_scope, naming_of
from aqtlite.program.plan import Plan
from aqtlite.program.planned import PlannedContraction
from aqtlite.program.rules import Rule
from aqtlite.quantization.state_collections import (
    OF_GRADIENTS,
    PARAMETERS,
    STATISTICS,
    collections_of,
)
from aqtlite.quantization.statistics import States

Parameters = int | Sequence[int] | Callable[[str], bool] | None


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

        traced, planned = self.traced(args, kwargs)
        aux = states_lib.init(traced.jaxpr, planned, traced.values((args, kwargs)))
        state: dict[str, Any] = {}
        for one, collection, entry in states_lib.left(planned, aux):
            state.setdefault(collection, {})[one.path] = entry
        return state

    def run(
        self, state: State, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Calls the function, quantized, and gathers statistics of the call.

        Args:
            state: state of the calibrations; empty if there is none.
            args: those of the function.
            kwargs: the same.

        Returns:
            Its result, and the state with the statistics of this call.
        """
        out, planned, aux = self._evaluate(state, args, kwargs, states_lib.updating)
        return out, states_lib.updated(state, planned, aux)

    def gather(self, state: State, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Gathers the statistics of a call whose contractions run in float.

        Every contraction sees what the float function gives it, and no statistics
        depend on those of another contraction: gathered in parts and merged, they are
        those of one pass.

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
            *args: those of the function.
            **kwargs: the same.

        Returns:
            The state with the statistics of this call.
        """
        _, planned, aux = self._evaluate(state, args, kwargs, states_lib.gathering)
        return states_lib.updated(state, planned, aux)

    def evaluate(
        self, state: State, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls the function, quantized, with the statistics as they are.

        Args:
            state: state of the calibrations; empty if there is none.
            args: those of the function.
            kwargs: the same.
        """
        return self._evaluate(state, args, kwargs, states_lib.contracting)[0]

    def _evaluate(
        self,
        state: State,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        how: Callable[[PlannedContraction, States], Replacement],
    ) -> tuple[Any, Plan, Aux]:
        traced, planned = self.traced(args, kwargs)
        outputs, aux = states_lib.evaluate(
            traced.jaxpr,
            planned,
            traced.values((args, kwargs)),
            lambda one: how(one, states_lib.states_of(one, state)),
        )
        # Constants of the program are no arrays.
        out = jax.tree.map(lambda i: jnp.asarray(outputs[i]), traced.outputs)
        return out, planned, aux

    def traced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tracing.Traced, Plan]:
        """Traces a call, and decides about every contraction."""
        traced = self.trace(args, kwargs)
        parameters = _parameters(self.params, traced, args, kwargs)
        planned = planning.make(traced.jaxpr, self.rules, parameters, self.naming)
        planning.report(planned, strict=self.strict)
        return traced, planned

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tracing.Traced:
        """Traces a call."""
        return tracing.trace(
            lambda args, kwargs: self.function(*args, **kwargs), (args, kwargs)
        )


def quantize_function(
    fn: Callable[..., Any],
    rules: Any,
    *,
    params: Parameters = None,
    strict: bool = False,
    paths: Paths = "scopes",
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
        fn: takes and returns pytrees of arrays.
        rules: a sequence of `Rule`, the first that fits decides; or a config, for
            every contraction.
        params: which arguments are parameters: the position of one, several of them,
            or a function that is told the path of a leaf of the arguments, such as
            "0/encoder/kernel", and says whether it is. An operand that depends on
            parameters alone is a weight. None: there are none.
        strict: raises if a contraction of floats stays in float though no rule says so.
        paths: what the path of a contraction is, which rules name. "scopes": the name
            scopes around it; where there are none, as "parameters". (The classes that
            Equinox leaves, and the equation that `jnp.einsum` leaves, do not count.)
            "parameters": the path of the parameter that it contracts, such as
            "layers/0/weight"; for a contraction of activations, the innermost node
            around the weights before and behind it, and its scopes.

    Returns:
        A function like `fn`. If a calibration of the rules gathers statistics or is
        learned, it is ``quantized(state, *args) -> (out, state)``, and
        ``quantized.init_state(*args)`` makes the state, by collections: "aqt_stats"
        holds statistics, "params" what is learned and to be trained, and
        "_overwrite_with_gradient" statistics of gradients, whose gradient is what takes
        their place (`with_gradient_statistics`).

    Raises:
        TypeError: if `fn` is a model or no function, `rules` are none, or `params` is
            none of these.
        ValueError: if `paths` is neither; when it is called, if a rule matches nothing,
            if none quantizes anything (unless each has ``cfg=None``), and with `strict`
            if a contraction stays in float.
    """
    if hasattr(fn, "init") and hasattr(fn, "apply"):
        raise TypeError(
            f"quantize_function takes a function, got the model {type(fn).__name__}: "
            "give its apply, with params=0; Linen models have "
            "aqtlite.flax.quantize_model"
        )
    if not callable(fn):
        raise TypeError(f"quantize_function takes a function, got {fn!r}")
    checked = rules_lib.check(rules)
    return QuantizedFunction(fn, checked, _positions(params), strict, naming_of(paths))


def _positions(params: Any) -> Parameters:
    """Returns what says which arguments are parameters, such that it is hashable.

    Raises:
        TypeError: if it is none of what `quantize_function` takes.
    """
    if params is None or callable(params):
        return params
    positions = tuple(params) if isinstance(params, Sequence) else (params,)
    if isinstance(params, str) or not all(type(one) is int for one in positions):
        raise TypeError(
            "params must be the position of an argument, several of them, or a "
            "function of the path of a leaf, such as "
            f"lambda path: path.startswith('0/encoder/'), got {params!r}"
        )
    return positions if isinstance(params, Sequence) else params


def plan(
    fn: Any,
    *args: Any,
    rules: Any,
    params: Parameters = None,
    paths: Paths = "scopes",
    **kwargs: Any,
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
        paths: as `quantize_function` takes it.
        **kwargs: as `args`.

    Raises:
        TypeError: if `rules` are none.
        ValueError: if a rule matches nothing, or `paths` is none that there are.
    """
    if hasattr(fn, "apply"):
        fn = fn.apply
        if params is None:
            is_linen = (
                bool(args) and isinstance(args[0], Mapping) and "params" in args[0]
            )
            params = _is_in_params if is_linen else 0
    quantized = quantize_function(fn, rules, params=params, paths=paths)
    return quantized.plan(*args, **kwargs)


def _is_in_params(path: str) -> bool:
    """Whether a leaf of the arguments is a parameter of a Linen model."""
    return path.startswith("0/params/")


def _is_state(x: Any) -> bool:
    """Tells a state from parameters, which may be in a collection "params", too."""
    collections = {PARAMETERS, STATISTICS, OF_GRADIENTS}
    if not isinstance(x, Mapping) or not x.keys() <= collections:
        return False
    return all(
        isinstance(by_path, Mapping) and all(map(_is_entry, by_path.values()))
        for by_path in x.values()
    )


def _is_entry(x: Any) -> bool:
    return isinstance(x, Mapping) and x.keys() <= set(States._fields)


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
