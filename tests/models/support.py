"""What the tests of other people's models share."""

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from tests.common import quick_jit

_OF_QWIX = re.compile(r"name=(dot_general_qt_fwd_bwd|conv_general_qt|ragged_dot_qt)\b")


def quantized_by_qwix(call: Callable[..., Any], *args: Any) -> int:
    """Number of contractions that Qwix quantizes in a call of a model of its."""
    return len(_OF_QWIX.findall(str(jax.make_jaxpr(call)(*args))))


def cross_entropy(logits, tokens):
    """Mean loss of the next token."""
    return optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1], tokens[:, 1:]
    ).mean()


def trained(loss, params, steps=20):
    """Parameters after steps of Adam on one batch, and the first and the last loss."""
    optimizer = optax.adam(1e-2)

    @quick_jit
    def step(params, state):
        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    losses, state = [], optimizer.init(params)
    for _ in range(steps):
        params, state, value = step(params, state)
        losses.append(float(value))
    return params, (losses[0], losses[-1])


def assert_trained_alike(losses, in_float):
    """A quantized model learns as the float model does."""
    assert losses[1] < losses[0]
    np.testing.assert_allclose(losses, in_float, rtol=0.05, atol=0.02)


def num_bytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
