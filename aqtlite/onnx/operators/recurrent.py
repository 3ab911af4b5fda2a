"""LSTM, GRU and plain recurrent layers."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.onnx.evaluation import Call, Value
from aqtlite.onnx.operators import activations
from aqtlite.onnx.operators.indexing import reversed_places
from aqtlite.onnx.registry import operator
from aqtlite.shapes.sharding import vary_together

Step = Callable[[tuple[Value, ...], Value], tuple[Value, ...]]
"""From a state and the projected input of a step to the next state."""

_DEFAULT_ACTIVATIONS = {
    "RNN": ("Tanh",),
    "GRU": ("Sigmoid", "Tanh"),
    "LSTM": ("Sigmoid", "Tanh", "Tanh"),
}

_NUMBERS: dict[str, tuple[str, ...]] = {
    "Affine": ("alpha", "beta"),
    "Elu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "LeakyRelu": ("alpha",),
    "ScaledTanh": ("alpha", "beta"),
    "ThresholdedRelu": ("alpha",),
}
"""Activations that take numbers of `activation_alpha` and `activation_beta`."""


@operator("LSTM", weights=(1, 2, 3, 7))
def _lstm(
    call: Call,
    x: Value,
    w: Value,
    r: Value,
    bias: Value = None,
    lengths: Value = None,
    initial_h: Value = None,
    initial_c: Value = None,
    peepholes: Value = None,
) -> Any:
    """Long short-term memory; gates in the order input, output, forget, cell."""

    def step_of(direction: int) -> Step:
        f, g, h = _activations(call, direction)
        hidden = r.shape[-1]
        p = jnp.zeros((3, hidden), x.dtype)
        if peepholes is not None:
            p = peepholes[direction].reshape(3, hidden)

        def step(state: tuple[Value, ...], projected: Value) -> tuple[Value, ...]:
            output, cell = state
            gates = projected + _times(output, r[direction])
            if bias is not None:
                gates = gates + _sum_of_biases(bias[direction])
            i, o, forget, c = jnp.split(gates, 4, axis=-1)
            if peepholes is not None:
                i, forget = i + p[0] * cell, forget + p[2] * cell
            i, forget, c = (_clipped(call, gate) for gate in (i, forget, c))
            i = f(i)
            forget = 1 - i if call.attribute("input_forget", 0) else f(forget)
            cell = forget * cell + i * g(c)
            o = o if peepholes is None else o + p[1] * cell
            return f(_clipped(call, o)) * h(cell), cell

        return step

    return _run(call, step_of, x, w, r, lengths, (initial_h, initial_c))


@operator("GRU", weights=(1, 2, 3))
def _gru(
    call: Call,
    x: Value,
    w: Value,
    r: Value,
    bias: Value = None,
    lengths: Value = None,
    initial_h: Value = None,
) -> Any:
    """Gated recurrent unit; gates in the order update, reset, hidden."""

    def step_of(direction: int) -> Step:
        f, g = _activations(call, direction)
        hidden = r.shape[-1]
        kernel = r[direction]
        of_input = of_state = jnp.zeros(3 * hidden, x.dtype)
        if bias is not None:
            of_input, of_state = jnp.split(bias[direction], 2)

        def step(state: tuple[Value, ...], projected: Value) -> tuple[Value, ...]:
            (output,) = state
            z_in, r_in, h_in = jnp.split(projected + of_input, 3, axis=-1)
            z_bias, r_bias, h_bias = jnp.split(of_state, 3)
            if call.attribute("linear_before_reset", 0):
                z_out, r_out, h_out = jnp.split(_times(output, kernel), 3, axis=-1)
                update = f(_clipped(call, z_in + z_out + z_bias))
                reset = f(_clipped(call, r_in + r_out + r_bias))
                candidate = h_in + reset * (h_out + h_bias)
            else:
                gates = _times(output, kernel[: 2 * hidden])
                z_out, r_out = jnp.split(gates, 2, axis=-1)
                update = f(_clipped(call, z_in + z_out + z_bias))
                reset = f(_clipped(call, r_in + r_out + r_bias))
                h_out = _times(reset * output, kernel[2 * hidden :])
                candidate = h_in + h_out + h_bias
            candidate = g(_clipped(call, candidate))
            return ((1 - update) * candidate + update * output,)

        return step

    return _run(call, step_of, x, w, r, lengths, (initial_h,))


@operator("RNN", weights=(1, 2, 3))
def _rnn(
    call: Call,
    x: Value,
    w: Value,
    r: Value,
    bias: Value = None,
    lengths: Value = None,
    initial_h: Value = None,
) -> Any:
    def step_of(direction: int) -> Step:
        (f,) = _activations(call, direction)

        def step(state: tuple[Value, ...], projected: Value) -> tuple[Value, ...]:
            total = projected + _times(state[0], r[direction])
            if bias is not None:
                total = total + _sum_of_biases(bias[direction])
            return (f(_clipped(call, total)),)

        return step

    return _run(call, step_of, x, w, r, lengths, (initial_h,))


def _run(
    call: Call,
    step_of: Callable[[int], Step],
    x: Value,
    w: Value,
    r: Value,
    lengths: Value,
    initial: tuple[Value, ...],
) -> tuple[Value, ...]:
    """Runs a layer in its directions; returns outputs, and the last states."""
    kind, is_batch_first = (
        call.attribute("direction", "forward"),
        call.attribute("layout", 0),
    )
    x = jnp.asarray(x)
    x = x.swapaxes(0, 1) if is_batch_first else x
    outputs, states = [], []
    for direction in range(w.shape[0]):
        is_reverse = kind == "reverse" or direction == 1
        state = tuple(
            jnp.zeros((x.shape[1], r.shape[-1]), x.dtype)
            if one is None
            else (one[:, direction] if is_batch_first else one[direction])
            for one in initial
        )
        projected = _times(x, w[direction])
        # Zeros do not vary over the axes of a `jax.shard_map`; later states may.
        state, projected, lengths = vary_together((state, projected, lengths))
        step = step_of(direction)
        if lengths is None:
            y, state = _scan(step, state, projected, is_reverse)
        else:
            y, state = _masked_scan(
                step, state, projected, jnp.asarray(lengths), is_reverse
            )
        outputs.append(y)
        states.append(state)
    axis = 1 if is_batch_first else 0
    y = jnp.stack(outputs, axis=1)  # (time, direction, batch, hidden)
    y = y.transpose(2, 0, 1, 3) if is_batch_first else y
    return (y, *(jnp.stack(one, axis=axis) for one in zip(*states, strict=True)))


def _scan(
    step: Step, state: tuple[Value, ...], projected: Value, is_reverse: bool
) -> tuple[Value, tuple[Value, ...]]:
    if projected.shape[0] == 1:
        state = step(state, projected[0])
        return state[0][None], state

    def body(state: tuple[Value, ...], of_step: Value) -> Any:
        after = step(state, of_step)
        return after, after[0]

    state, y = lax.scan(body, state, projected, reverse=is_reverse)
    return y, state


def _masked_scan(
    step: Step,
    state: tuple[Value, ...],
    projected: Value,
    lengths: Value,
    is_reverse: bool,
) -> tuple[Value, tuple[Value, ...]]:
    """Scans sequences of different lengths: states stay, and outputs are 0, after."""
    size, batch = projected.shape[:2]
    place = reversed_places(lengths, size), np.arange(batch)
    projected = projected[place] if is_reverse else projected

    def body(state: tuple[Value, ...], inputs: Any) -> Any:
        of_step, is_inside = inputs
        after = step(state, of_step)
        pairs = zip(after, state, strict=True)
        kept = tuple(jnp.where(is_inside, new, old) for new, old in pairs)
        return kept, jnp.where(is_inside, after[0], 0)

    is_inside = np.arange(size, dtype=np.int32)[:, None, None] < lengths[:, None]
    state, y = lax.scan(body, state, (projected, is_inside))
    return (y[place] if is_reverse else y), state


def _times(x: Value, kernel: Value) -> Value:
    """Product with a kernel (output, input)."""
    axes = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(jnp.asarray(x), jnp.asarray(kernel), axes)


def _sum_of_biases(bias: Value) -> Value:
    of_input, of_state = jnp.split(bias, 2)
    return of_input + of_state


def _clipped(call: Call, x: Value) -> Value:
    bound = call.attribute("clip")
    return x if bound is None else jnp.clip(x, -bound, bound)


def _activations(call: Call, direction: int) -> list[Callable[[Value], Value]]:
    """Activation functions of a direction, with their numbers."""
    defaults = _DEFAULT_ACTIVATIONS[call.node.op_type]
    names = call.attribute("activations")
    if names is None:
        return [activations.FUNCTIONS[name] for name in defaults]
    spelled = {name.lower(): name for name in activations.FUNCTIONS}
    numbers = {
        "alpha": iter(call.attribute("activation_alpha") or ()),
        "beta": iter(call.attribute("activation_beta") or ()),
    }
    functions = [_activation(call, spelled, name, numbers) for name in names]
    count = len(defaults)
    return functions[direction * count : (direction + 1) * count]


def _activation(
    call: Call, spelled: dict[str, str], name: str, numbers: dict[str, Any]
) -> Callable[[Value], Value]:
    if name.lower() not in spelled:
        raise call.unsupported(f"the activation {name!r}")
    function = activations.FUNCTIONS[spelled[name.lower()]]
    given = {}
    for number in _NUMBERS.get(spelled[name.lower()], ()):
        value = next(numbers[number], None)
        if value is not None:
            given[number] = value
    return lambda x: function(x, **given)
