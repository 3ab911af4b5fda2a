"""Serving conversion of quantized functions, and serving of what it returns."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from aqtlite.program import served, weight_parameters
from aqtlite.program.calibration_state import State
from aqtlite.program.program import Program
from aqtlite.program.quantize import QuantizedFunction
from aqtlite.program.serving import (
    conversion,
    given,
    guards,
    planning,
    statistics_uses,
)
from aqtlite.program.serving.framework import KeyPath, Model
from aqtlite.program.serving.frozen_parameter import FrozenParameter
from aqtlite.program.serving.frozen_record import (
    COLLECTION,
    FrozenEntry,
    frozen_entries,
)
from aqtlite.program.serving.model import (
    Buffer,
    CallTrace,
    Discovery,
    FoundOperand,
    Parameter,
    by_input,
    parameters_of,
)
from aqtlite.program.serving.placeholder import Placeholder, is_placeholder, marker_of
from aqtlite.program.serving.report import ConversionReport
from aqtlite.program.serving.weight import Weight
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization.states import second_moment
from aqtlite.quantization.states.state_collections import STATISTICS
from aqtlite.quantization.states.stored_statistics import restored_statistics


def convert_function(
    fn_q: QuantizedFunction,
    params: Any,
    *args: Any,
    state: State | None = None,
    strict: bool = False,
    report: Callable[[ConversionReport], Any] | None = None,
    packed: str | None = None,
    **kwargs: Any,
) -> tuple["ServingFunction", dict[str, Any]]:
    """Freezes the quantized weights of a function.

    A weight is an operand of a quantized contraction that depends only on parameters.
    The part of the traced program that computes the weights runs once; the rest does
    not run.

    >>> import jax.numpy as jnp
    >>> from aqtlite import config
    >>> from aqtlite.program.quantize import quantize_function
    >>> fn_q = quantize_function(
    ...     lambda w, x: x @ w, config.fully_quantized(), params=0
    ... )
    >>> w, x = jnp.ones((32, 4)), jnp.ones((2, 32))
    >>> serve_fn, serving = convert_function(fn_q, w, x)
    >>> bool((serve_fn(serving, x) == fn_q(w, x)).all())
    True
    >>> sum(leaf.nbytes for leaf in jax.tree.leaves(serving["aqt"])), w.nbytes
    (144, 512)

    Args:
        fn_q: the quantized function, with its parameters as the first argument.
        params: its parameters, or their shapes (`jax.ShapeDtypeStruct`). One may be a
            `QTensor`, whose integers are kept where the config has its grid and blocks
            and the function only moves it; else it is decoded and rounded again.
        *args: its other arguments, or their shapes.
        state: state of the calibrations, if they have one; else it may be empty.
        strict: raise if a weight stays in float.
        report: function to call with the `ConversionReport`; `print` prints a table.
        packed: "cpu" packs int4 and int8 weights as the kernel of the extra ``cpu``
            reads them, so that `jax.jit` need not lay them out at every call. Other
            platforms, and CPUs without the kernel, unpack them at every call; results
            are the same. None stores them as they are; other names raise ValueError.
        **kwargs: as `args`.

    Returns:
        ``serve_fn(serving_params, *args, **kwargs)``, with results equal to those of
        `fn_q` bit for bit, unless weights are rounded at conversion (`config.Gptq`),
        and `serving_params`: a dictionary with the remaining parameters in "params",
        the integers and scales in "aqt", and the state in "state", with fixed scales
        (`FixedScale`) in place of the statistics they were computed from. A
        `FrozenParameter` (see `aqtlite.is_frozen`) replaces each parameter that only
        frozen weights read.

    Raises:
        TypeError: if `fn_q` is not a `QuantizedFunction`, if it does not take the
            arguments, or if `params` holds anything but arrays and numbers.
        ValueError: if `fn_q` was not quantized with ``params=0`` or a predicate, if
            `params` are converted already, if `state` is missing or superfluous, if no
            contraction is quantized or none of those that are has a weight, or if
            statistics have seen no batch; with `strict`, if a weight stays in float.
    """
    if not isinstance(fn_q, QuantizedFunction):
        raise TypeError(
            "convert_function takes what aqtlite.quantize_function returned, got "
            f"{type(fn_q).__name__}"
        )
    if fn_q.params != 0 and not callable(fn_q.params):
        raise ValueError(
            f"the function was quantized with params={fn_q.params!r}, and convert_"
            "function freezes its first argument: quantize it with params=0"
        )
    if isinstance(params, Mapping) and params.keys() == _KEYS:
        raise ValueError(
            "the parameters are those of a serving function, which convert_function "
            "returned: they are converted already; give it the float parameters"
        )
    params, quantized_params = given.split(params)
    conversion.check_call(
        fn_q.function,
        (params, *args),
        kwargs,
        "convert_function(fn_q, params, *args, **kwargs) traces "
        "fn_q(params, *args, **kwargs)",
    )
    program = program_of(fn_q, params, args, kwargs, state or {})
    quantized = program.plan.operations()
    has_state = fn_q.has_state or any(
        bool(one.collections) for one in program.plan.replaced()
    )
    # Without calibrations that have one, `init_state` returns an empty state.
    if (has_state and state is None) or (state and not has_state):
        raise ValueError(
            "state= is the state of the quantized function's calibrations, "
            + ("which have none" if state else "and was not given")
        )
    if not quantized:
        raise ValueError(
            "nothing to freeze: the rules quantize none of the function's contractions"
            + program.plan.reasons()
        )
    kinds = {operand.kind for one in quantized for operand in (one.lhs, one.rhs)}
    if "weight" not in kinds:
        raise ValueError(
            f"nothing to freeze: none of the {len(quantized)} contractions that the "
            "rules quantize has an operand that depends on parameters alone. Those of "
            f"params={fn_q.params!r} are parameters; what a function closes over is a "
            "constant: make it a part of the first argument"
        )
    model = FunctionModel([program], params, state or {}, quantized_params)
    plan = planning.plan(model)
    serving = conversion.convert(plan, strict=strict, report=report, packed=packed)
    return ServingFunction(fn_q), model.fix_scales(serving)


@dataclasses.dataclass(frozen=True)
class ServingFunction:
    """A quantized function of serving parameters."""

    function: QuantizedFunction
    converter: str = guards.FUNCTION
    """The user's call of the conversion, for messages."""

    @property
    def __name__(self) -> str:
        return f"serve_{self.function.__name__}"

    def __call__(self, serving: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not isinstance(serving, Mapping) or set(serving) != _KEYS:
            is_mapping = isinstance(serving, Mapping)
            names = f" with {', '.join(map(str, serving))}" if is_mapping else ""
            raise TypeError(
                f"{self.__name__} takes the serving parameters that convert_function "
                f"returned, a dictionary with {', '.join(sorted(_KEYS))}, got "
                f"{type(serving).__name__}{names}"
            )
        guards.check_restored(serving[COLLECTION])
        leaves, treedef = jax.tree.flatten(serving["params"], is_leaf=is_placeholder)
        shapes = jax.tree.unflatten(
            treedef,
            [x.struct if is_placeholder(x) else x for x in leaves],
        )
        state = serving["state"]
        program = program_of(self.function, shapes, args, kwargs, state)
        frozen = frozen_by_module(serving[COLLECTION])
        given = [*leaves, *jax.tree.leaves((args, kwargs))]
        values = [given[i] for i in program.traced.leaves]
        outputs = served.serve(program, values, frozen, self.converter)
        return program.traced.result(outputs)


_KEYS = {"params", "state", COLLECTION}


def frozen_by_module(collection: Mapping[str, Any]) -> served.Entries:
    """Returns the frozen weights of serving parameters, by the path of their module."""
    paths = {module: tuple(filter(None, module.split("/"))) for module in collection}
    return {
        path: list(frozen_entries(collection[module], path))
        for module, path in paths.items()
    }


def program_of(
    function: QuantizedFunction,
    params: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    state: State,
) -> Program:
    """Traces a call of a quantized function with its parameters as the first argument.

    Args:
        function: the quantized function.
        params: the parameters, or their shapes.
        args: the other arguments, or their shapes.
        kwargs: keyword arguments.
        state: state of the calibrations; empty if there is none.
    """
    program = function.program(state, (params, *args), dict(kwargs))
    # The parameters are the first argument, so their leaves come first.
    found = dict(enumerate(parameters_of(params)))
    leaves = enumerate(program.traced.leaves)
    parameters = {i: found[leaf] for i, leaf in leaves if leaf in found}
    return dataclasses.replace(program, parameters=parameters)


_QUANTIZED_ELSEWHERE = (
    "contracted by a function that quantizes on its own and whose weights cannot be "
    "frozen here (aqtlite.make_dot_general, aqtlite.flax.AqtDotGeneral): name the "
    "contraction by a rule, or inject that of aqtlite.flax.nnx, in its place"
)


class FunctionModel(Model):
    """Traced calls of quantized functions with shared parameters."""

    def __init__(
        self,
        programs: Sequence[Program],
        params: Any,
        state: State,
        quantized: Mapping[KeyPath, QTensor] | None = None,
    ):
        """Takes the traced calls that will be served.

        Args:
            programs: the calls.
            params: their parameters, or the parameters' shapes.
            state: state of the calibrations; empty if there is none.
            quantized: parameters that are quantized already, by path, whose shapes
                are in `params`.

        Raises:
            ValueError: if statistics have seen no batch.
        """
        self._programs, self._params = programs, params
        self._state = restored_statistics(state)
        statistics_uses.check_gathered(
            self._state.get(STATISTICS, {}),
            "call what is quantized with some batches first, and convert with the "
            "state that is left",
        )
        super().__init__(params, self._state, len(programs), given=quantized)

    def discover(self, call: int) -> Discovery:
        program = dataclasses.replace(self._programs[call], state=self._state)
        with statistics_uses.noted_in(self.uses_of_statistics):
            return program.discovery()

    def record(self, call: int, weights: Sequence[FoundOperand]) -> CallTrace:
        program = self._programs[call]
        traced = program.traced_record(self._state, weights)
        _, state_in = traced.inputs
        read: dict[int, Parameter | Buffer]
        read = {**program.parameters, **by_input(state_in, self.buffers)}
        return CallTrace(traced.jaxpr, read, tuple(traced.outputs[1]))

    def serving(
        self,
        weights: Sequence[Weight],
        stored: Sequence[FrozenEntry],
        frozen: Mapping[Parameter, Placeholder],
    ) -> Any:
        """Returns the serving parameters of a `ServingFunction`."""
        collection: dict[str, Any] = {}
        for one in stored:
            collection.setdefault("/".join(one.module), {})[one.name] = one.stored
        state = dict(self._state)
        if STATISTICS in state:
            state[STATISTICS] = second_moment.without(state[STATISTICS])
        return {
            "state": state,
            "params": self.with_placeholders(frozen),
            COLLECTION: collection,
        }

    def fix_scales(self, serving: Any) -> Any:
        return {**serving, "state": self.fixed_state(serving["state"])}

    def fixed_state(self, state: State) -> dict[str, Any]:
        """Returns a state with fixed scales in place of statistics of operands."""
        if STATISTICS not in state:
            return dict(state)
        found = self.uses_of_statistics
        fixed = statistics_uses.fix(state[STATISTICS], found, is_frozen=True)
        return {**state, STATISTICS: fixed}

    def with_placeholders(self, frozen: Mapping[Parameter, Placeholder]) -> Any:
        """Returns the parameters, with a `FrozenParameter` for each frozen one."""
        params = self.left_in_float(self._params, frozen)
        leaves, treedef = jax.tree.flatten(params)
        for parameter, one in frozen.items():
            leaves[parameter.number] = FrozenParameter(
                one.shape,
                one.dtype,
                one.number,
                one.sliced,
                one.spec,
                str(parameter),
                marker_of(self.values[parameter]),
            )
        return jax.tree.unflatten(treedef, leaves)

    def quantized_elsewhere(self) -> dict[Parameter, str]:
        found = (
            one
            for each in self._programs
            for one in weight_parameters.quantized_elsewhere(each.plan, each.parameters)
        )
        return dict.fromkeys(found, _QUANTIZED_ELSEWHERE)


def has_frozen(params: Any) -> bool:
    """Whether a tree contains a `FrozenParameter`."""
    leaves = jax.tree.leaves(params, is_leaf=is_placeholder)
    return any(map(is_placeholder, leaves))
