"""Merges the adapters of quantized functions into their parameters."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from aqtlite.program.adapters import merging
from aqtlite.program.adapters.merging import MergeReport
from aqtlite.program.calibration_state import State
from aqtlite.program.convert import ServingFunction, frozen_by_module, program_of
from aqtlite.program.quantize import QuantizedFunction
from aqtlite.program.served import Entries
from aqtlite.program.serving import guards
from aqtlite.program.serving.frozen_record import COLLECTION
from aqtlite.program.serving.placeholder import is_placeholder


def merge_adapters(
    fn: QuantizedFunction | ServingFunction,
    params: Any,
    *args: Any,
    state: State | None = None,
    report: Callable[[MergeReport], Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Adds the products of adapters to the parameters of their weights, in float.

    Where a rule quantizes a weight, the product is added to the rounded weight, beside
    which the adapter was trained. Integers are made of the result by `convert_function`
    with rules without adapters. That rounds again, and at few bits loses much of a
    small update: the report gives the error, relative to the update. Serving adapters
    beside the weights loses nothing.

    >>> import aqtlite
    >>> import jax.numpy as jnp
    >>> from aqtlite import config
    >>> rule = aqtlite.Rule(cfg=None, adapter=config.Lora(rank=2, alpha=4))
    >>> fn = aqtlite.quantize_function(lambda w, x: x @ w, [rule], params=0)
    >>> w, x = jnp.ones((8, 4)), jnp.ones((2, 8))
    >>> state = fn.init_state(w, x)
    >>> merged = merge_adapters(fn, w, x, state=state)
    >>> bool((merged == w).all())  # as B starts at zero
    True

    Args:
        fn: result of `quantize_function`, or the serving function of it.
        params: its parameters, its first argument; the serving parameters, for a
            serving function: frozen weights are dequantized.
        *args: its other arguments, or their shapes.
        state: state with the adapters, of a `quantize_function`.
        report: function to call with the `MergeReport`; `print` prints a table.
        **kwargs: as `args`.

    Returns:
        Parameters of the float function.

    Raises:
        TypeError: if `fn` is neither.
        ValueError: if there is no adapter, if a weight is more than moved parameters,
            if two contractions of one weight have adapters, or if something else reads
            it, such as a lookup of a tied embedding.
    """
    if isinstance(fn, ServingFunction):
        frozen = frozen_by_module(params[COLLECTION])
        function, params, state = fn.function, params["params"], params["state"]
    elif isinstance(fn, QuantizedFunction):
        function, frozen = fn, {}
    else:
        raise TypeError(
            "merge_adapters takes what aqtlite.quantize_function or aqtlite."
            f"convert_function returned, got {type(fn).__name__}; of Linen and NNX "
            "models, aqtlite.flax.merge_adapters and aqtlite.flax.nnx.merge_adapters"
        )
    merged, found = merged_parameters(
        function, params, args, kwargs, state or {}, frozen, guards.FUNCTION
    )
    if report is not None:
        report(found)
    return merged


def merged_parameters(
    function: QuantizedFunction,
    params: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    state: State,
    frozen: Entries,
    converter: str,
) -> tuple[Any, MergeReport]:
    """Merges the adapters of one call of a function.

    Args:
        function: the function.
        params: its parameters, with placeholders for those that are frozen.
        args: its other arguments, or their shapes.
        kwargs: keyword arguments, or their shapes.
        state: state with the adapters.
        frozen: the frozen weights, by module.
        converter: the user's call of the conversion, for messages.
    """
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_placeholder)
    shapes = [x.struct if is_placeholder(x) else x for x in leaves]
    shaped = jax.tree.unflatten(treedef, shapes)
    program = program_of(function, shaped, args, kwargs, state)
    given = [*leaves, *jax.tree.leaves((args, kwargs))]
    values = [given[i] for i in program.traced.leaves]
    changed, report = merging.merge(program, values, frozen, converter)
    for i, value in changed.items():
        leaves[program.traced.leaves[i]] = value
    return jax.tree.unflatten(treedef, leaves), report
