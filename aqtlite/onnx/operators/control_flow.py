"""Conditions and loops."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.onnx.evaluation import Call, Value, is_static
from aqtlite.onnx.registry import operator
from aqtlite.shapes.sharding import vary_together

_DEPENDS_ON_DATA = (
    "the condition depends on data. An input that decides becomes known with "
    "aqtlite.onnx.load(path, constants={name: array})"
)


@operator("If")
def _if(call: Call, condition: Value) -> Any:
    branches = call.attribute("else_branch"), call.attribute("then_branch")
    if is_static(condition):
        return tuple(call.run(branches[bool(condition.reshape(()))]))
    runs = [lambda branch=branch: _arrays(call, branch) for branch in branches]
    try:
        shapes = [jax.eval_shape(run) for run in runs]
    except (TypeError, ValueError) as error:
        error.add_note(f"{call.node} runs both branches: {_DEPENDS_ON_DATA}")
        raise
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"{call.node} has branches with different results, {_text(shapes[1])} and "
            f"{_text(shapes[0])}: {_DEPENDS_ON_DATA}"
        )
    return lax.cond(jnp.asarray(condition).reshape(()), runs[1], runs[0])


def _arrays(call: Call, branch: Any) -> tuple[Value, ...]:
    return tuple(jnp.asarray(value) for value in call.run(branch))


def _text(shapes: Any) -> str:
    return ", ".join(f"{one.dtype}{list(one.shape)}" for one in shapes)


@operator("Loop")
def _loop(call: Call, count: Value, condition: Value, *state: Value) -> Any:
    """Unrolls a loop whose number of steps is known in tracing.

    As in onnxruntime, the body's condition ends it also where none is given.
    """
    steps = None if count is None else call.integer(count, "trip count")
    body, number = call.attribute("body"), len(state)
    if condition is None:
        condition = np.asarray(True)
    stacks: list[list[Value]] = []
    while steps is None or len(stacks) < steps:
        if not call.static(condition, "condition").all():
            break
        step = np.asarray(len(stacks), np.int64)
        condition, *results = call.run(body, step, condition, *state)
        state = tuple(results[:number])
        stacks.append(results[number:])
    if stacks or len(body.outputs) == 1 + number:
        return (*state, *map(jnp.stack, zip(*stacks, strict=True)))
    shapes = jax.eval_shape(
        lambda state: call.run(body, np.int64(0), np.asarray(True), *state)[1:], state
    )
    empty = (jnp.zeros((0, *one.shape), one.dtype) for one in shapes[number:])
    return (*state, *empty)


@operator("Scan")
def _scan(call: Call, *inputs: Value) -> Any:
    if call.opset < 9:
        raise call.unsupported(
            "scans had a batch axis: onnx.version_converter.convert_version makes it a "
            "newer one"
        )
    scanned_count = call.attribute("num_scan_inputs")
    state_count = len(inputs) - scanned_count
    body = call.attribute("body")
    outputs_count = len(body.outputs) - state_count
    input_axes = call.attribute("scan_input_axes") or [0] * scanned_count
    output_axes = call.attribute("scan_output_axes") or [0] * outputs_count
    backwards = call.attribute("scan_input_directions") or [0] * scanned_count
    written = call.attribute("scan_output_directions") or [0] * outputs_count
    state = tuple(map(jnp.asarray, inputs[:state_count]))
    scanned = [
        jnp.moveaxis(jnp.asarray(x), axis, 0)
        for x, axis in zip(inputs[state_count:], input_axes, strict=True)
    ]
    scanned = [
        jnp.flip(x, 0) if back else x
        for x, back in zip(scanned, backwards, strict=True)
    ]

    # Constants do not vary over the axes of a `jax.shard_map`; later states may.
    state, scanned = vary_together((state, scanned))

    def step(state: tuple[Value, ...], slices: Any) -> Any:
        results = [jnp.asarray(x) for x in call.run(body, *state, *slices)]
        return tuple(results[:state_count]), tuple(results[state_count:])

    state, stacks = lax.scan(step, state, tuple(scanned))
    stacks = [
        jnp.moveaxis(jnp.flip(x, 0 if back else ()), 0, axis)
        for x, back, axis in zip(stacks, written, output_axes, strict=True)
    ]
    return (*state, *stacks)
