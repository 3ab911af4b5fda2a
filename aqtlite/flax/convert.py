"""The serving conversion: float parameters in, frozen integer weights out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import core as flax_core
from flax import linen as nn
from jax.extend import core

from aqtlite.flax import conversion, partitioning, program
from aqtlite.flax import report as report_lib
from aqtlite.flax.conversion import Decision, Entry
from aqtlite.flax.report import ConversionReport
from aqtlite.flax.site import COLLECTION
from aqtlite.flax.tracing import Call


def convert(
    model: nn.Module,
    variables: Mapping[str, Any],
    *args: Any,
    calls: Sequence[Call] | None = None,
    strict: bool = False,
    report: Callable[[ConversionReport], Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Freezes the quantized weights of a trained model into its variables.

    The model's calls are traced, and every operand of a quantized contraction is a
    *weight* if its value depends on nothing but parameters and constants: not on
    `args` and `kwargs`, on other collections, or on rngs. That is read off the traced
    program, so that a transposed, cast, stacked or otherwise transformed parameter
    counts as much as a plain one; ``AqtDotGeneral(frozen_operands=...)`` overrides it.
    Only the part of the program that makes the weights is run. No inference is.

    In serving, a contraction knows its frozen weight by the parameters that its
    operand is made of, not by the order of calls. An operand that is made of frozen
    parameters in a way that no given call had raises, and gives NaN under `jax.jit`.

    Args:
        model: a Linen module with `AqtDotGeneral` or `AqtEinsum` inside.
        variables: its trained variables, or their shapes (`jax.ShapeDtypeStruct`).
        *args: what ``model.apply(variables, *args, **kwargs)`` takes in serving;
            arrays may be given as shapes.
        calls: in place of `args` and `kwargs`, several calls that will be served, such
            as prefill and decode: ``calls=[Call(x, memory), Call(x)]``. What any of
            them contracts is frozen, and a parameter is removed if none reads it.
        strict: raise if a weight cannot be frozen, rather than quantize it at every
            call.
        report: called with a `ConversionReport`: what was frozen, what stayed in float,
            and why. ``report=print`` prints a table.
        **kwargs: as `args`. `method`, `rngs` and `mutable` are `apply`'s.

    Returns:
        The serving variables: `variables` with a collection "aqt" that holds, under
        the path of each module that contracts a weight, its integers and scales by the
        name of the parameter, and with a `FrozenKernel` (a pytree node without
        numbers) in place of each parameter that nothing else reads. Where nothing
        could be frozen, there is no such collection.
        ``model.apply(serving, x)`` serves, with the same model. Partitioning metadata
        carries over to the integers and, with None for the axes that share a scale,
        to the scales.

    Raises:
        ValueError: if the variables are converted already or lack "params", if the
            model has no quantized contraction, if `frozen_operands` names an operand
            that depends on the inputs; with `strict`, if a weight stays in float.

    >>> import jax.numpy as jnp
    >>> from aqtlite import config
    >>> from aqtlite.flax import AqtDotGeneral
    >>> dense = nn.Dense(4, dot_general=AqtDotGeneral(config.fully_quantized()))
    >>> x = jnp.ones((2, 3))
    >>> variables = dense.init(jax.random.key(0), x)
    >>> serving = convert(dense, variables, x)
    >>> serving["aqt"]["kernel"]["rhs"].qvalue.dtype
    dtype('int8')
    >>> bool((dense.apply(serving, x) == dense.apply(variables, x)).all())
    True
    """
    if calls is None:
        calls = [Call(*args, **kwargs)]
    elif args or kwargs:
        raise TypeError("convert takes either a call's arguments or calls=, not both")
    elif not (isinstance(calls, list | tuple) and calls) or not all(
        isinstance(call, Call) for call in calls
    ):
        raise TypeError(
            "calls must be a list of aqtlite.flax.Call, such as "
            f"[Call(x), Call(x[:1])], got {type(calls).__name__}"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"convert takes a flax.linen.Module, got {type(model).__name__}; NNX "
            "modules cannot be converted"
        )
    variables = checked(variables)
    decision = conversion.decide(model, variables, calls, lambda path, inputs: False)
    made = _freeze(decision.entries, variables["params"])
    serving = assemble(variables, decision, made)
    summary = report_lib.report_of(variables, decision, made)
    if strict:
        report_lib.check_all_frozen(summary)
    report_lib.log(summary)
    if report is not None:
        report(summary)
    return serving


def checked(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Float variables, as plain dictionaries.

    Raises:
        ValueError: if they are none, or hold frozen weights.
    """
    if not isinstance(variables, Mapping) or "params" not in variables:
        raise ValueError(
            "convert takes the variables of a Linen model, a mapping with a collection "
            f"'params'; got {type(variables).__name__}"
            + (f" of {sorted(variables)}" if isinstance(variables, Mapping) else "")
        )
    if jax.tree.leaves(variables.get(COLLECTION, {})):
        raise ValueError(
            f"the variables hold frozen weights already (collection '{COLLECTION}'); "
            "convert takes the float variables of training"
        )
    return {name: flax_core.unfreeze(value) for name, value in variables.items()}


def assemble(
    variables: Mapping[str, Any], decision: Decision, made: Sequence[Any]
) -> dict[str, Any]:
    """The serving variables.

    Args:
        variables: the float variables.
        decision: what to freeze.
        made: what to store for each entry.
    """
    collection: dict[str, Any] = {}
    for entry, stored in zip(decision.entries, made, strict=True):
        tree = collection
        for step in entry.path:
            tree = tree.setdefault(step, {})
        tree[entry.name] = stored
    records = [entry.record for entry in decision.entries]
    params = conversion.with_placeholders(
        variables["params"], decision.removed, records
    )
    frozen = {COLLECTION: collection} if collection else {}
    return {**variables, "params": params, **frozen}


def _freeze(entries: Sequence[Entry], params: Any) -> list[dict[str, Any]]:
    """Runs the parts of the programs that make the weights."""
    leaves = jax.tree.leaves(params)
    is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    made: dict[int, dict[str, Any]] = {}
    traces = {id(entry.record.trace): entry.record.trace for entry in entries}
    for trace in traces.values():
        own = [i for i, entry in enumerate(entries) if entry.record.trace is trace]
        outputs = [output for i in own for output in entries[i].outputs()]
        cut, kept = program.cut(trace.program, outputs)
        run, inputs = core.jaxpr_as_fun(cut), [leaves[i] for i in kept]
        values = jax.eval_shape(run, *inputs) if is_abstract else jax.jit(run)(*inputs)
        boxes = partitioning.boxes(cut, kept, params)
        first = 0
        for i in own:
            last = first + len(entries[i].outputs())
            made[i] = stored(entries[i], values[first:last], boxes[first:last])
            first = last
    return [made[i] for i in range(len(entries))]


def stored(entry: Entry, values: Sequence[Any], boxes: Sequence[Any]) -> dict[str, Any]:
    """What to store for an entry, boxed like the parameters that it is made of.

    Args:
        entry: the weight.
        values: of the entry's outputs.
        boxes: of the outputs, by `partitioning.boxes`.
    """
    side = entry.site.operand.side
    result = entry.unflatten(values)
    box = entry.unflatten(boxes)[side].qvalue
    result[side] = partitioning.box_qtensor(result[side], box)
    return result
