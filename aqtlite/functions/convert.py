"""Serving functions, and the frozen weights that they take in place of floats."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.functions.program import Program, noting
from aqtlite.functions.quantize import QuantizedFunction
from aqtlite.functions.states import State, states_of
from aqtlite.jaxpr import tracing
from aqtlite.serving import conversion, fixed_scales, planning, uses
from aqtlite.serving import report as report_lib
from aqtlite.serving.call_site import COLLECTION, SITE, CallSite, FrozenEntry
from aqtlite.serving.contraction import (
    OperandKey,
    Recorder,
)
from aqtlite.serving.identity import Identity
from aqtlite.serving.model import Buffer, CallTrace, Model, Parameter
from aqtlite.serving.placeholder import Placeholder
from aqtlite.serving.report import ConversionReport
from aqtlite.serving.uses import Uses
from aqtlite.sharding import explicit_spec
from aqtlite.state_collections import STATISTICS


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[],
    meta_fields=["shape", "dtype", "number", "sliced", "spec"],
)
@dataclasses.dataclass(frozen=True)
class FrozenParameter(Placeholder):
    """A parameter that was frozen: a pytree without leaves."""


def convert_function(
    fn_q: QuantizedFunction,
    params: Any,
    *args: Any,
    state: State | None = None,
    strict: bool = False,
    report: Callable[[ConversionReport], Any] | None = None,
    **kwargs: Any,
) -> tuple["ServingFunction", dict[str, Any]]:
    """Freezes the quantized weights of a function into its parameters.

    The part of the traced program that makes each weight, an operand of a quantized
    contraction that depends on parameters alone, is run once, and nothing else of it.

    >>> import jax.numpy as jnp
    >>> from aqtlite import config
    >>> from aqtlite.functions.quantize import quantize_function
    >>> fn_q = quantize_function(
    ...     lambda w, x: x @ w, config.fully_quantized(), params=0
    ... )
    >>> w, x = jnp.ones((32, 4)), jnp.ones((2, 32))
    >>> serve_fn, serving = convert_function(fn_q, w, x)
    >>> bool((serve_fn(serving, x) == fn_q(w, x)).all())
    True
    >>> sum(leaf.nbytes for leaf in jax.tree.leaves(serving)), w.nbytes
    (144, 512)

    Args:
        fn_q: the quantized function, whose first argument is its parameters.
        params: these, or their shapes (`jax.ShapeDtypeStruct`).
        *args: its other arguments, or their shapes.
        state: of its calibrations, if they have one.
        strict: raises if a weight stays in float.
        report: is called with a `ConversionReport`; `print` prints it as a table.
        **kwargs: as `args`.

    Returns:
        ``serve_fn(serving_params, *args, **kwargs)``, which gives what `fn_q` does, bit
        for bit, and `serving_params`: a dictionary with the parameters that are left
        in "params", the integers and scales in "aqt", and the state in "state", with
        the scales of static ranges (`FixedScale`) in place of the statistics that they
        come from. A parameter that nothing else reads has given way to a
        `FrozenParameter`, which has no leaves.

    Raises:
        TypeError: if `fn_q` is no `QuantizedFunction`, or `params` holds anything but
            arrays and numbers.
        ValueError: if its `params` is not its first argument, if no contraction is
            quantized, or if statistics are of no batch; with `strict`, if a weight
            stays in float.
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
    if fn_q.has_state != (state is not None):
        raise ValueError(
            "state= is the state of the quantized function's calibrations, "
            + ("which have none" if state is not None else "and was not given")
        )
    if not _program(fn_q, params, args, kwargs, state or {}).plan.quantized():
        raise ValueError(
            "nothing to freeze: the rules quantize none of the function's contractions"
        )
    serving, summary = freeze(fn_q, params, args, kwargs, state or {})
    if strict:
        report_lib.check_all_frozen(summary)
    report_lib.log(summary)
    if report is not None:
        report(summary)
    return ServingFunction(fn_q), serving


def freeze(
    fn_q: QuantizedFunction,
    params: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: State,
) -> tuple[dict[str, Any], ConversionReport]:
    """Freezes the quantized weights of a function, as `convert_function` does.

    Args:
        fn_q: the quantized function, whose first argument is its parameters.
        params: these, or their shapes.
        args: its other arguments, or their shapes.
        kwargs: the same.
        state: of its calibrations; empty if there is none.

    Returns:
        What `ServingFunction` takes, and what became of each parameter.

    Raises:
        ValueError: if statistics of the state are of no batch.
    """
    fixed_scales.check_gathered(
        state.get(STATISTICS, {}),
        "call what is quantized with some batches first, and convert with the state "
        "that is left",
    )
    model = _Model(fn_q, params, args, kwargs, state)
    plan = planning.plan(model)
    values: dict[Parameter | Buffer, Any] = {}
    values.update(model.buffers.items())
    values.update(zip(model.parameters, jax.tree.leaves(params), strict=True))
    stored = conversion.freeze(plan.weights, values)
    collection: dict[str, Any] = {}
    for weight, one in zip(plan.weights, stored, strict=True):
        entries = collection.setdefault("/".join(weight.module), {})
        entries[weight.name] = {SITE: weight.site, **one.values}
    if STATISTICS in state:
        statistics = fixed_scales.fix(
            state[STATISTICS], model.uses_of_statistics, is_frozen=True
        )
        state = {**state, STATISTICS: statistics}
    serving = {
        "state": state,
        "params": _with_placeholders(params, plan.placeholders()),
        COLLECTION: collection,
    }
    return serving, report_lib.report_of(plan, stored)


@dataclasses.dataclass(frozen=True)
class ServingFunction:
    """A quantized function that takes frozen weights for some of its parameters."""

    function: QuantizedFunction

    @property
    def __name__(self) -> str:
        return f"serve_{self.function.__name__}"

    def __call__(self, serving: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten(serving["params"], is_leaf=_is_frozen)
        shapes = jax.tree.unflatten(
            treedef,
            [x.struct if isinstance(x, Placeholder) else x for x in leaves],
        )
        values = jax.tree.unflatten(treedef, leaves)
        state = serving["state"]
        program = _program(self.function, shapes, args, kwargs, state)
        frozen = {
            tuple(module.split("/")) if module else (): [
                FrozenEntry(name, entry[SITE], entry)
                for name, entry in entries.items()
                if isinstance(entry.get(SITE), CallSite)
            ]
            for module, entries in serving[COLLECTION].items()
        }
        given = jax.tree.leaves(((values, *args), kwargs), is_leaf=_is_frozen)
        outputs = program.serve([given[i] for i in program.traced.leaves], frozen)
        return jax.tree.map(lambda i: jnp.asarray(outputs[i]), program.traced.outputs)


def _is_frozen(x: Any) -> bool:
    return isinstance(x, FrozenParameter)


class _Model(Model):
    """A quantized function with its parameters, and the one call that is served."""

    num_calls = 1

    def __init__(
        self,
        function: QuantizedFunction,
        params: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: State,
    ):
        self._function, self._params, self._state = function, params, state
        self._args, self._kwargs = args, kwargs
        self.parameters = _parameters_of(params)
        flat = jax.tree_util.tree_flatten_with_path(state)[0]
        self.uses_of_statistics = Uses()
        self.buffers = {Buffer(i, path): leaf for i, (path, leaf) in enumerate(flat)}

    def trace(
        self,
        call: int,
        recorder: Recorder,
        frozen: Mapping[Parameter, Placeholder],
    ) -> CallTrace:
        del call
        leaves, treedef = jax.tree.flatten(self._params)
        placeholders = _by_number(leaves, frozen)
        kept = {
            parameter.number: leaves[parameter.number]
            for parameter in self.parameters
            if parameter.number not in placeholders
        }

        def run(kept: Any, state: Any, args: Any, kwargs: Any) -> Any:
            full = [
                placeholders[i] if i in placeholders else kept[i]
                for i in range(len(leaves))
            ]
            shapes = [x.struct if isinstance(x, Placeholder) else x for x in full]
            program = _program(
                self._function, jax.tree.unflatten(treedef, shapes), args, kwargs, state
            )
            given = [*full, *jax.tree.leaves((args, kwargs))]
            values = [given[i] for i in program.traced.leaves]
            return program.record(values, recorder)

        arguments = kept, self._state, self._args, self._kwargs
        with uses.noted_in(self.uses_of_statistics):
            traced = tracing.trace(run, arguments)
        kept_in, state_in, _, _ = traced.inputs
        return CallTrace(
            traced.jaxpr,
            {
                i: self.parameters[number]
                for number, i in kept_in.items()
                if i is not None
            },
            dict(zip(jax.tree.leaves(state_in), self.buffers, strict=True)),
            tuple(traced.outputs[1]),
        )

    def identities(
        self,
        call: int,
        keys: frozenset[OperandKey],
        frozen: Mapping[Parameter, Placeholder],
    ) -> list[Identity | None]:
        stored = self.trace(call, noting(keys), {}).stored
        program = _program(
            self._function, self._params, self._args, self._kwargs, self._state
        )
        return [program.identity_of(one.key) for one in stored]


def _program(
    function: QuantizedFunction,
    params: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: State,
) -> Program:
    """Traces a call of a quantized function."""
    traced, planned = function.traced((params, *args), kwargs)
    parameters = {
        i: parameter
        for i, parameter in enumerate(_parameters_of(params))
        if i in traced.leaves
    }
    return Program(
        traced,
        planned,
        {traced.leaves.index(i): one for i, one in parameters.items()},
        module_of=lambda one: tuple(filter(None, one.module.split("/"))),
        states_of=lambda one: states_of(one, state),
        place_of=lambda one: (one.path,),
    )


def _parameters_of(params: Any) -> tuple[Parameter, ...]:
    """The leaves of the parameters."""
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    for path, leaf in flat:
        if not tracing.is_array(leaf) and not isinstance(leaf, int | float | complex):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise TypeError(
                f"params holds {leaf!r} at {name!r}, which is no array: close over it, "
                "as over what eqx.partition(module, eqx.is_array) gives beside arrays"
            )
    return tuple(
        Parameter(
            number=number,
            path=tuple(map(_name, path)) or ("params",),
            key_path=path,
            shape=np.shape(leaf),
            dtype=jax.dtypes.result_type(leaf),
            spec=explicit_spec(leaf),
        )
        for number, (path, leaf) in enumerate(flat)
    )


def _name(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)


def _with_placeholders(params: Any, frozen: Mapping[Parameter, Placeholder]) -> Any:
    leaves, treedef = jax.tree.flatten(params)
    by_number = {
        number: FrozenParameter(one.shape, one.dtype, one.number, one.sliced, one.spec)
        for number, one in _by_number(leaves, frozen).items()
    }
    return jax.tree.unflatten(
        treedef, [by_number.get(i, leaf) for i, leaf in enumerate(leaves)]
    )


def _by_number(
    leaves: list[Any], frozen: Mapping[Parameter, Placeholder]
) -> dict[int, Placeholder]:
    """The placeholders of parameters by number.

    One whose dtype is weak stays as it is: traced in another dtype, it would make other
    weights.
    """
    return {
        parameter.number: one
        for parameter, one in frozen.items()
        if not _is_weakly_typed(leaves[parameter.number])
    }


def _is_weakly_typed(leaf: Any) -> bool:
    return not tracing.is_array(leaf) or getattr(leaf, "weak_type", False)
