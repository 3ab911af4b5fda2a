"""Recurrent cells, whose layers take no `dot_general`, inside `nn.RNN`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from aqtlite.flax import AqtDotGeneral, WithDotGeneral, convert
from tests.common import rms_error
from tests.flax.support import DG, INT8, XX, apply, assert_equal, init

LIFTED = ["params", "aqt"]


def rnn(cell):
    return WithDotGeneral(nn.RNN(cell, variable_broadcast=LIFTED), DG)


def loop_body(text):
    """What a compiled program repeats, with everything that it calls."""
    bodies = re.findall(r" while\\(.*body=%?([\\w.\\-]+)", text)
    assert bodies, "no loop is left"
    computations = dict(re.findall(r"(?m)^%?([\\w.\\-]+) [^\\n]*{\\n(.*?)^}", text, re.S))
    seen, left = {}, list(bodies)
    while left:
        name = left.pop()
        if name in computations and name not in seen:
            seen[name] = computations[name]
            left += re.findall(r"%([\\w.\\-]+)", computations[name])
    return "\n".join(seen.values())


@pytest.mark.parametrize("cell", [nn.LSTMCell(8), nn.GRUCell(8)], ids=["lstm", "gru"])
def test_served_equals_trained(cell):
    model, plain = rnn(cell), nn.RNN(cell)
    variables = init(model, XX)
    assert jax.tree.structure(variables) == jax.tree.structure(init(plain, XX))
    serving = convert(model, variables, XX, strict=True)
    kernels = [w for w in jax.tree.leaves(serving["params"]) if w.ndim > 1]
    assert not kernels
    out = apply(model, variables, XX)
    assert_equal(out, apply(model, serving, XX))
    assert rms_error(out, apply(plain, variables, XX)) < 0.03


def test_trains():
    model, plain = rnn(nn.LSTMCell(8)), nn.RNN(nn.LSTMCell(8))
    variables = init(model, XX)
    got, wanted = (
        jax.jit(jax.grad(lambda v, m=m: (m.apply(v, XX) ** 2).sum()))(variables)
        for m in (model, plain)
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert rms_error(a, b) < 0.1


def test_layers_with_a_dot_general_of_their_own_keep_it():
    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8)(x)
            return nn.Dense(8, dot_general=jax.lax.dot_general)(x)

    model = WithDotGeneral(Layers(), DG)
    jaxpr = str(jax.make_jaxpr(model.apply)(init(model, XX), XX))
    assert len(re.findall(r"i32\\[.*dot_general|dot_general.*int32", jaxpr)) <= 1
    serving = convert(model, init(model, XX), XX)
    assert set(serving["aqt"]) == {"Dense_0"}


def test_a_cell_without_layers_is_refused():
    model = rnn(nn.OptimizedLSTMCell(8))
    with pytest.raises(TypeError, match="nn.LSTMCell takes the same parameters"):
        model.init(jax.random.key(0), XX)
