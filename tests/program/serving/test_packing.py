"""Weights that a conversion packs for CPUs: bits are those of training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx, serialization

import aqtlite
from aqtlite import Rule, calibration, config, numerics
from aqtlite.flax import AqtDotGeneral, convert, quantize_model
from aqtlite.flax import nnx as aqtlite_nnx
from aqtlite.lowering.forms import panel_products
from aqtlite.qtensor.packed_values import PackedValues
from tests.common import normal
from tests.flax.support import init

NAME = "aqtlite_panels"


def in_blocks(cfg, size):
    return config.update(cfg, {"fwd.rhs.blocks": config.Blocks(size=size)})


CFG = in_blocks(config.weight_only(4), 32)
X = normal((3, 64))


class Layer(nn.Module):
    dot_general: object = None
    axis: int = 0

    @nn.compact
    def __call__(self, x, _=None):
        return jnp.tanh(nn.Dense(64, dot_general=self.dot_general)(x)), None


class Stack(Layer):
    """Two layers in a scan."""

    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, "aqt": self.axis}
        scanned = nn.scan(
            Layer, variable_axes=axes, split_rngs={"params": True}, length=2
        )
        return scanned(self.dot_general)(x, None)[0]


def injected():
    return of_linen(Stack(AqtDotGeneral(CFG)))


def by_rules():
    return of_linen(quantize_model(Stack(), CFG))


def of_linen(model):
    variables = init(model, X)
    packed = convert(model, variables, X, packed="cpu")
    restored = serialization.from_bytes(packed, serialization.to_bytes(packed))
    return model.apply, variables, model.apply, jax.tree.map(jnp.asarray, restored)


class Nnx(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(64, 27, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


def of_nnx():
    model = aqtlite_nnx.quantize_model(Nnx(), CFG)
    packed = aqtlite_nnx.convert(model, X, packed="cpu")
    (graph, variables), (served_graph, packed) = map(nnx.split, (model, packed))

    def function(graph):
        return lambda state, x: nnx.merge(graph, state)(x)

    return function(graph), variables, function(served_graph), packed


def of_function():
    def layers(weights, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    function = aqtlite.quantize_function(layers, CFG, params=0)
    weights = normal((2, 64, 64))
    serve, packed = aqtlite.convert_function(function, weights, X, packed="cpu")
    return function, weights, serve, packed


@pytest.mark.parametrize("way", [injected, by_rules, of_nnx, of_function])
def test_served_equals_trained_with_and_without_the_kernel(way, monkeypatch):
    trained, variables, serve, packed = way()
    wanted = jax.jit(lambda *args: trained(*args))(variables, X)
    assert jnp.uint8 in [x.dtype for x in jax.tree.leaves(packed)]
    served = jax.jit(lambda *args: serve(*args))
    assert (NAME in served.lower(packed, X).as_text()) == panel_products.runs_here()
    np.testing.assert_array_equal(served(packed, X), wanted)
    if way is injected:
        program = aqtlite.compile_serving(serve, packed, X)
        np.testing.assert_array_equal(program(X), wanted)
    monkeypatch.setattr(panel_products, "runs_here", lambda: False)
    served = jax.jit(lambda *args: serve(*args))
    assert NAME not in served.lower(packed, X).as_text()
    np.testing.assert_array_equal(served(packed, X), wanted)


INT16 = {"fwd.lhs.numerics": numerics.IntSymmetric(bits=16)}
AFFINE = {
    "fwd.lhs.numerics": numerics.IntAffine(bits=8),
    "fwd.lhs.calibration": calibration.MinMax(),
}
PACKED = {
    "float_by_int8": config.weight_only(8),
    "int8": config.qat(8),
    "int8_in_blocks": in_blocks(config.qat(8), 64),
    "int8_less_zero_points": config.update(config.qat(8), AFFINE),
    "w4a8": config.w4a8(),
}
AS_THEY_ARE = {
    "int16_by_int8": config.update(config.qat(8), INT16),
    "nf4": config.update(
        config.weight_only(4), {"fwd.rhs.numerics": numerics.NormalFloat()}
    ),
    "batch": config.qat(8),
    "odd": config.qat(8),
}
SUMS = {"batch": "abk,bkn->abn", "float_by_int8": "abk,nbk->an"}
SHAPES = {"batch": (2, 64, 16), "odd": (63, 16), "float_by_int8": (27, 2, 64)}


@pytest.mark.slow
def test_formats_and_what_stays_as_it_is():
    """With two contracted axes, and columns that are no whole panel."""
    cfgs = PACKED | AS_THEY_ARE
    weights = {name: normal(SHAPES.get(name, (64, 27))) for name in cfgs}
    x = normal((3, 2, 64))

    def layers(params, x):
        out = {}
        for name, w in params.items():
            y = x[..., : w.shape[0]] if name == "odd" else x
            with jax.named_scope(name):
                sums = SUMS.get(name, "abk,kn->abn")
                out[name] = jnp.sum(jnp.tanh(jnp.einsum(sums, y, w)), -1)
        return out

    rules = [Rule(path=f"{name}(/.*)?", cfg=cfg) for name, cfg in cfgs.items()]
    function = aqtlite.quantize_function(layers, rules, params=0)
    reports = []
    serve, packed = aqtlite.convert_function(
        function, weights, x, packed="cpu", report=reports.append
    )
    _, plain = aqtlite.convert_function(function, weights, x)
    noted = {p.path for p in reports[0].parameters if "packed for CPUs" in p.rounding}
    assert noted == {*PACKED}
    size = sum(x.nbytes for x in jax.tree.leaves(packed["aqt"]) if x.dtype != jnp.int4)
    assert abs(reports[0].bytes_after - size) < 4000

    run = jax.jit(lambda *args: serve(*args))
    jax.tree.map(np.testing.assert_array_equal, run(packed, x), run(plain, x))


def test_other_programs_and_forms_of_the_same_weight():
    model = nn.Dense(27, dot_general=AqtDotGeneral(CFG))
    variables = init(model, X)
    plain, packed = (convert(model, variables, X, packed=p) for p in (None, "cpu"))
    refreshed = jax.jit(lambda v: convert(model, v, X, packed="cpu"))(variables)
    jax.tree.map(np.testing.assert_array_equal, refreshed, packed)
    shapes = convert(model, jax.eval_shape(lambda: variables), X, packed="cpu")
    assert jax.tree.structure(shapes) == jax.tree.structure(packed)
    assert [x.shape for x in jax.tree.leaves(shapes)] == [
        x.shape for x in jax.tree.leaves(packed)
    ]

    exported = jax.export.export(jax.jit(model.apply), platforms=["cpu", "tpu"])
    exported = exported(packed, X)
    assert NAME not in exported.mlir_module()
    wanted = jax.jit(model.apply)(plain, X)
    np.testing.assert_array_equal(exported.call(packed, X), wanted)

    def several(serving, x):
        stacked = jax.tree.map(lambda x: jnp.stack([x, x]), serving)
        return jnp.sum(jax.vmap(model.apply, (0, None))(stacked, x) ** 2)

    gradient = jax.jit(jax.grad(several, 1))
    np.testing.assert_array_equal(gradient(packed, X), gradient(plain, X))


@pytest.mark.code("quick")
def test_a_packed_weight_is_an_array_like_any():
    model = nn.Dense(27, dot_general=AqtDotGeneral(CFG))
    variables = init(model, X)
    plain, packed = (
        convert(model, variables, X, packed=p)["aqt"]["kernel"]["rhs"]
        for p in (None, "cpu")
    )
    assert isinstance(packed.qvalue, PackedValues)
    assert "int4[27,64], scale=float32[27,2], packed" in repr(packed)
    assert packed.shape == plain.shape == (64, 27)
    assert packed.unpacked().qvalue.dtype == jnp.int4
    values = jax.jit(lambda q: (q.dequant(), q[:, 3].dequant(), q.T.dequant()))
    jax.tree.map(np.testing.assert_array_equal, values(packed), values(plain))


@pytest.mark.code("quick")
def test_a_platform_or_a_stack_that_has_no_packed_form():
    model = Stack(AqtDotGeneral(CFG), axis=1)
    variables = init(model, X)
    with pytest.raises(ValueError, match="packed='tpu' is no platform"):
        convert(model, variables, X, packed="tpu")
    serving = convert(model, variables, X, packed="cpu")
    assert jnp.uint8 not in [x.dtype for x in jax.tree.leaves(serving)]
    first = convert(Stack(AqtDotGeneral(CFG)), variables, X, packed="cpu")
    with pytest.raises(ValueError, match="stacked along its first axis"):
        jax.eval_shape(model.apply, first, X)
