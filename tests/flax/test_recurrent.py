"""Recurrent cells, whose layers take no `dot_general`, inside `nn.RNN`."""

import re

import jax
import pytest
from flax import linen as nn

from aqtlite import config
from aqtlite.flax import convert, inject_dot_general
from tests.common import left_in_float, rms_error
from tests.flax.support import DG, XX, apply, assert_equal, init

pytestmark = pytest.mark.code("quick")


class Injected(nn.Module):
    """Calls a module with quantized layers inside."""

    module: nn.Module

    def __call__(self, x):
        with inject_dot_general(DG):
            return self.module(x)


def rnn(cell):
    return Injected(nn.RNN(cell, variable_broadcast=["params", "aqt"]))


def loop_body(text):
    """What the loop of a compiled program repeats, with everything that it calls."""
    header = r"(?ms)^(?:ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}"
    computations = dict(re.findall(header, text))
    left, seen = re.findall(r"while\(.*?body=%?([\w.\-]+)", text), {}
    assert left, "no loop is left"
    while left:
        name = left.pop()
        if name in computations and name not in seen:
            seen[name] = computations[name]
            left += re.findall(r"%([\w.\-]+)", computations[name])
    return "\n".join(seen.values())


@pytest.mark.code("users")
@pytest.mark.parametrize(
    "cell",
    [nn.LSTMCell(8), pytest.param(nn.GRUCell(8), marks=pytest.mark.slow)],
    ids=["lstm", "gru"],
)
def test_served_equals_trained(cell):
    model = rnn(cell)
    variables = init(model, XX)
    serving = convert(model, variables, XX, strict=True)
    kernels = [w for w in left_in_float(serving["params"]) if w.ndim > 1]
    assert not kernels
    out = apply(model, variables, XX)
    assert_equal(out, apply(model, serving, XX))
    in_float = {"params": variables["params"]["module"]}
    assert rms_error(out, apply(nn.RNN(cell), in_float, XX)) < 0.03


@pytest.mark.slow
def test_trains():
    model, plain = rnn(nn.LSTMCell(12)), nn.RNN(nn.LSTMCell(12))
    params = init(model, XX)["params"]["module"]

    def gradient(model):
        return jax.jit(jax.grad(lambda v: (model.apply(v, XX) ** 2).sum()))

    program = gradient(model).lower({"params": {"module": params}}).compile()
    got = program({"params": {"module": params}})
    wanted = gradient(plain)({"params": params})
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert rms_error(a, b) < 0.1
    # The loops read the integers of the recurrent weights, which they neither make nor
    # keep for every step.
    text = program.as_text()
    made_by = re.findall(r" = s8\[12,12\]\S* ([\w\-]+)\(", loop_body(text))
    assert set(made_by) <= {"get-tuple-element", "parameter", "bitcast"}
    assert made_by and f"s8[{XX.shape[1]},12,12]" not in text


def test_layers_with_a_dot_general_of_their_own_keep_it():
    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8)(x)
            return nn.Dense(8, dot_general=jax.lax.dot_general)(x)

    model = Injected(Layers())
    serving = convert(model, init(model, XX), XX)
    assert set(serving["aqt"]["module"]) == {"Dense_0"}


def test_a_cell_without_layers_is_refused():
    model = rnn(nn.OptimizedLSTMCell(8))
    with pytest.raises(TypeError, match="nn.LSTMCell takes the same parameters"):
        model.init(jax.random.key(0), XX)


def test_a_config_is_no_function_to_inject():
    injected = inject_dot_general(config.qat())
    with pytest.raises(TypeError, match=r"AqtDotGeneral\(cfg\), got"), injected:
        pass


@pytest.mark.parametrize("is_served", [False, True], ids=["trained", "served"])
def test_weights_are_quantized_before_the_loop(is_served):
    model = rnn(nn.LSTMCell(12))
    variables = init(model, XX)
    if is_served:
        variables = convert(model, variables, XX)
    body = loop_body(jax.jit(model.apply).lower(variables, XX).compile().as_text())
    assert "s8[12,12]" in body
    assert "f32[12,12]" not in body and "f32[8,12]" not in body
