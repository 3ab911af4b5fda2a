"""Loaded networks are quantized, calibrated and exported as functions are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
import aqtlite.onnx
from aqtlite import Rule, config, edge
from tests.onnx.models import convolutional, transformer

pytestmark = pytest.mark.code("quick")

RNG = np.random.default_rng(2)
IMAGES = RNG.normal(size=(16, 3, 8, 8)).cumsum(axis=3).astype(np.float32)  # Smooth.
TOKENS = RNG.integers(0, 9, size=(16, 6))
NETWORKS = {"convolutional": convolutional(), "transformer": transformer()}
INPUTS = {"convolutional": IMAGES, "transformer": TOKENS}


def decibels(found, exact):
    return 20 * jnp.log10(jnp.linalg.norm(exact) / jnp.linalg.norm(found - exact))


def test_paths_are_names_of_nodes():
    function, parameters = aqtlite.onnx.load(NETWORKS["transformer"])
    rules = [
        Rule(path="attention/(scores|values)/.*", cfg=None),
        Rule(path="mlp/up/MatMul", cfg=config.weight_only(bits=4)),
        Rule(operands="weight", cfg=config.fully_quantized()),
    ]
    plan = aqtlite.plan(function, parameters, TOKENS, rules=rules, params=0)
    assert [one.path for one in plan.contractions] == [
        *(f"attention/{name}/MatMul" for name in "qkv"),
        "attention/scores/MatMul",
        "attention/values/MatMul",
        "attention/out/MatMul",
        "mlp/up/MatMul",
        "mlp/down/MatMul",
    ]
    assert plan.summary() == "8 contractions: 6 quantized, 2 in float"


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_served_is_what_was_quantized(name):
    function, parameters = aqtlite.onnx.load(NETWORKS[name])
    rule = Rule(operands="weight", cfg=config.fully_quantized())
    quantized = aqtlite.quantize_function(function, rule, params=0)
    serve, serving = aqtlite.convert_function(quantized, parameters, INPUTS[name])
    served = jax.jit(serve)(serving, INPUTS[name])
    assert (served == jax.jit(quantized)(parameters, INPUTS[name])).all()
    assert decibels(served, jax.jit(function)(parameters, INPUTS[name])) > 25


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "path"), [("convolutional", "a/Conv"), ("transformer", "mlp/up/MatMul")]
)
def test_gptq_rounds_weights_of_the_file(name, path):
    function, parameters = aqtlite.onnx.load(NETWORKS[name])
    inputs = INPUTS[name]
    cfg = config.update(config.weight_only(bits=3), {"fwd.rhs.rounding": config.Gptq()})
    quantized = aqtlite.quantize_function(function, Rule(path=path, cfg=cfg), params=0)
    state = quantized.init_state(parameters, inputs)
    state = jax.jit(quantized.gather)(state, parameters, inputs)
    serve, serving = aqtlite.convert_function(
        quantized, parameters, inputs, state=state
    )
    exact = jax.jit(function)(parameters, inputs)
    nearest, _ = jax.jit(quantized)(state, parameters, inputs)  # Not converted.
    served = jax.jit(serve)(serving, inputs)
    assert decibels(served, exact) > decibels(nearest, exact) + 1


def test_sensitivity_of_the_contractions():
    function, parameters = aqtlite.onnx.load(NETWORKS["convolutional"])
    found = aqtlite.sensitivity(
        function,
        parameters,
        [IMAGES[:8], IMAGES[8:]],
        candidates={"4 bits": config.weight_only(bits=4)},
    )
    paths = [one.path for one in found.contractions]
    assert paths == ["a/Conv", "b/Conv", "c/Gemm"]


@pytest.mark.slow
def test_a_file_for_the_edge(tmp_path):
    function, parameters = aqtlite.onnx.load(NETWORKS["convolutional"])
    ranges = edge.calibrate(function, parameters, [IMAGES])
    report = edge.export(
        function, parameters, ranges, IMAGES[:1], tmp_path / "network.tflite"
    )
    assert report.float_operators == ()
