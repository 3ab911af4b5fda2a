"""Serving conversion of quantized functions."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from aqtlite.program import served
from aqtlite.program.calibration_state import State
from aqtlite.program.freezing import FunctionCall, FunctionModel, is_frozen
from aqtlite.program.quantize import QuantizedFunction
from aqtlite.program.serving import conversion, guards, planning
from aqtlite.program.serving.frozen_record import COLLECTION, frozen_entries
from aqtlite.program.serving.report import ConversionReport
from aqtlite.quantization.state_collections import collections_of


def convert_function(
    fn_q: QuantizedFunction,
    params: Any,
    *args: Any,
    state: State | None = None,
    strict: bool = False,
    report: Callable[[ConversionReport], Any] | None = None,
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
    >>> sum(leaf.nbytes for leaf in jax.tree.leaves(serving)), w.nbytes
    (144, 512)

    Args:
        fn_q: the quantized function, with its parameters as the first argument.
        params: its parameters, or their shapes (`jax.ShapeDtypeStruct`).
        *args: its other arguments, or their shapes.
        state: state of the calibrations, if they have one.
        strict: raise if a weight stays in float.
        report: function to call with the `ConversionReport`; `print` prints a table.
        **kwargs: as `args`.

    Returns:
        ``serve_fn(serving_params, *args, **kwargs)``, with results equal to those of
        `fn_q` bit for bit, and `serving_params`: a dictionary with the remaining
        parameters in "params", the integers and scales in "aqt", and the state in
        "state", with fixed scales (`FixedScale`) in place of the statistics they were
        computed from. A `FrozenParameter`, which has no leaves, replaces each parameter
        that only frozen weights read.

    Raises:
        TypeError: if `fn_q` is not a `QuantizedFunction`, if it does not take the
            arguments, or if `params` holds anything but arrays and numbers.
        ValueError: if `fn_q` was not quantized with ``params=0`` or a predicate, if
            `state` is missing or superfluous, if no contraction is quantized, or if
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
    conversion.check_call(
        fn_q.function,
        (params, *args),
        kwargs,
        "convert_function(fn_q, params, *args, **kwargs) traces "
        "fn_q(params, *args, **kwargs)",
    )
    call = FunctionCall(fn_q, args, kwargs)
    program = call.program(params, state or {})
    quantized = program.plan.quantized()
    has_state = fn_q.has_state or any(
        bool(collections_of(one.cfg)) for one in quantized
    )
    if has_state != (state is not None):
        raise ValueError(
            "state= is the state of the quantized function's calibrations, "
            + ("which have none" if state is not None else "and was not given")
        )
    if not quantized:
        raise ValueError(
            "nothing to freeze: the rules quantize none of the function's contractions"
            + program.plan.reasons()
        )
    model = FunctionModel([program], params, state or {})
    plan = planning.plan(model)
    serving = conversion.convert(plan, strict=strict, report=report)
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
            raise TypeError(
                f"{self.__name__} takes the serving parameters that convert_function "
                f"returned, a dictionary with {', '.join(sorted(_KEYS))}, got "
                f"{_brief(serving)}"
            )
        guards.check_restored(serving[COLLECTION])
        leaves, treedef = jax.tree.flatten(serving["params"], is_leaf=is_frozen)
        shapes = jax.tree.unflatten(
            treedef,
            [x.struct if is_frozen(x) else x for x in leaves],
        )
        params = jax.tree.unflatten(treedef, leaves)
        state = serving["state"]
        program = FunctionCall(self.function, args, kwargs).program(shapes, state)
        frozen = {
            tuple(filter(None, module.split("/"))): [
                one for _, one in frozen_entries(entries)
            ]
            for module, entries in serving[COLLECTION].items()
        }
        given = jax.tree.leaves(((params, *args), kwargs), is_leaf=is_frozen)
        values = [given[i] for i in program.traced.leaves]
        outputs = served.serve(program, values, frozen, self.converter)
        return jax.tree.map(lambda i: jnp.asarray(outputs[i]), program.traced.outputs)


_KEYS = {"params", "state", COLLECTION}


def _brief(x: Any) -> str:
    keys = f" with {', '.join(map(str, x))}" if isinstance(x, Mapping) else ""
    return f"{type(x).__name__}{keys}"
