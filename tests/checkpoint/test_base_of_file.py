"""Frozen weights beside adapters, straight from quantized files of other libraries."""

import dataclasses
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import aqtlite
from aqtlite import Rule, config
from aqtlite.checkpoint import (
    CheckpointError,
    Move,
    config_of,
    fill,
    load_quantized,
    move_weights,
)
from aqtlite.flax import AqtDotGeneral, convert, quantize_model, with_adapters
from aqtlite.flax import nnx as aqt_nnx
from aqtlite.testing import assert_no_float_copy
from tests.common import normal, relative_error

pytestmark = pytest.mark.code("quick")

FILES = pathlib.Path(__file__).parent / "formats_written_by_others"
LORA = config.Lora(2, 4)
FORMATS = {
    "bnb_nf4_nested": "model.layers.0.mlp.up_proj.weight",
    "gptq_4": "model.layers.0.mlp.up_proj.weight",
    "gptq_3": "model.layers.0.mlp.up_proj.weight",
    "awq": "model.layers.0.mlp.up_proj.weight",
    "gguf/tiny.gguf": "Q4_0.weight",
}


def move(name, root):
    return Move(sources=name, targets=f"{root}kernel", axes=(1, 0))


def rule_of(q):
    tensor = config_of(q, axes=1)
    return Rule(
        cfg=config.update(config.weight_only(), {"fwd.rhs": tensor}), adapter=LORA
    )


class Linen:
    """A layer of Linen, its base as a file has it."""

    root = "params/"

    def __init__(self, q, x):
        outputs, _ = q.shape
        self.net = nn.Dense(outputs, use_bias=False)
        self.model = quantize_model(self.net, [rule_of(q)])
        self.shapes = jax.eval_shape(self.net.init, jax.random.key(0), x)

    def base(self, variables, x, report):
        base = convert(self.model, variables, x, report=report)
        self.variables = with_adapters(base, self.model.init_adapters(base, x))
        return base["aqt"]["kernel"]["rhs"]

    def calls(self):
        return self.model.apply, self.variables


class Nnx:
    """A layer of NNX."""

    root = ""

    def __init__(self, q, x):
        outputs, inputs = q.shape
        layer = lambda: nnx.Linear(inputs, outputs, use_bias=False, rngs=nnx.Rngs(0))  # noqa: E731
        self.model = aqt_nnx.quantize_model(nnx.eval_shape(layer), [rule_of(q)])
        self.shapes = nnx.state(self.model, nnx.Param)

    def base(self, variables, x, report):
        nnx.update(self.model, variables)
        self.model = aqt_nnx.convert(self.model, x, report=report)
        aqt_nnx.init_state(self.model, x)
        return self.model.aqt.frozen[""]["kernel"].get_value()

    def calls(self):
        graph, state = nnx.split(self.model)
        return (lambda state, x: nnx.merge(graph, state)(x)), state


class Function:
    """A function."""

    root = ""

    def __init__(self, q, x):
        fn = lambda params, x: x @ params["kernel"]  # noqa: E731
        self.fn_q = aqtlite.quantize_function(fn, [rule_of(q)], params=0)
        self.shapes = {"kernel": jax.ShapeDtypeStruct(q.shape[::-1], q.dtype)}

    def base(self, params, x, report):
        state = self.fn_q.init_state(self.shapes, x)
        self.serve, self.serving = aqtlite.convert_function(
            self.fn_q, params, x, state=state, report=report
        )
        ((entry,),) = (one.values() for one in self.serving["aqt"].values())
        return entry["rhs"]

    def calls(self):
        return self.serve, self.serving


@pytest.mark.parametrize(
    ("case", "way"),
    [
        ("bnb_nf4_nested", Linen),
        ("bnb_nf4_nested", Nnx),
        ("gptq_3", Linen),
        ("gptq_3", Nnx),
        ("awq", Function),
        ("gguf/tiny.gguf", Function),
    ],
)
def test_integers_are_those_of_the_file(case, way, caplog):
    name = FORMATS[case]
    q = load_quantized(FILES / case)[name]
    x = normal((3, q.shape[1]))
    one = way(q, x)
    moved = move_weights({name: q}, [move(name, one.root)], one.shapes)
    reports = []
    stored = one.base(fill(one.shapes, moved), x, reports.append).in_own_order()
    assert "frozen, integers as given" in str(reports[0])
    assert "froze no parameters" not in caplog.text
    bits = 15 if jnp.iinfo(q.qvalue.dtype).bits == 4 else 255
    np.testing.assert_array_equal(
        np.asarray(stored.qvalue).astype(np.int8) & bits,
        np.asarray(q.qvalue).astype(np.int8).T & bits,
    )
    np.testing.assert_array_equal(stored.scale, q.scale.T)
    np.testing.assert_array_equal(stored.dequant(), q.dequant().T)
    apply, variables = one.calls()
    assert relative_error(apply(variables, x), x @ q.dequant().T) < 1e-5
    if case == "gptq_3" and way is Nnx:  # CPUs decode tables to floats in memory.
        assert_no_float_copy(apply, variables, x)


def fn_of(fn, tensor):
    cfg = config.update(config.weight_only(), {"fwd.rhs": tensor})
    return aqtlite.quantize_function(fn, cfg, params=0)


Q = load_quantized(FILES / "gptq_4")[FORMATS["gptq_4"]]
INT4 = config_of(Q, axes=1)


@pytest.mark.parametrize(
    ("fn", "tensor", "outcome"),
    [
        (lambda w: w[4:].T, INT4, "frozen, integers as given"),
        (lambda w: 2 * w.T, INT4, "rounded again"),
        (lambda w: w.T, config.weight_only(8).fwd.rhs, "rounded again"),
        (lambda w: w.T + w[0, 0], INT4, "rounded again"),
    ],
    ids=["sliced", "doubled", "other_grid", "added"],
)
def test_what_becomes_of_integers_is_reported(fn, tensor, outcome, caplog):
    reports = []
    fn_q = fn_of(lambda w, x: x @ fn(w), tensor)
    with caplog.at_level("WARNING", logger="absl"):
        aqtlite.convert_function(fn_q, Q, normal((2, 96)), report=reports.append)
    assert outcome in str(reports[0])
    assert ("rounded again" in caplog.text) == (outcome == "rounded again")


def test_integers_that_are_read_as_floats_are_decoded():
    fn = lambda w, x: x @ w.T + w[0, 0]  # noqa: E731
    x, reports = normal((2, 96)), []
    fn_q = fn_of(fn, INT4)
    serve, serving = aqtlite.convert_function(fn_q, Q, x, report=reports.append)
    assert "decoded from integers" in str(reports[0])
    np.testing.assert_array_equal(serving["params"], Q.dequant())
    assert relative_error(serve(serving, x), fn(Q.dequant(), x)) < 1e-6


@pytest.mark.parametrize("way", [Linen, Nnx, Function])
def test_a_call_before_the_conversion_says_what_to_do(way):
    one = way(Q, normal((2, 96)))
    name = FORMATS["gptq_4"]
    moved = move_weights({name: Q}, [move(name, one.root)], one.shapes)
    filled = fill(one.shapes, moved)
    if way is Nnx:
        nnx.update(one.model, filled)
    calls = {
        Linen: lambda: one.model.apply(filled, normal((2, 96))),
        Nnx: lambda: one.model(normal((2, 96))),
        Function: lambda: one.fn_q.init_state(filled, normal((2, 96))),
    }
    text = r"kernel \(96, 32\) in the arguments is quantized.* Convert the model"
    with pytest.raises(TypeError, match=text):
        calls[way]()
    with pytest.raises(TypeError, match=r"is converted first \(aqtlite\.flax\.convert"):
        nn.Dense(32, use_bias=False).apply({"params": {"kernel": Q.T}}, normal((2, 96)))


def test_layers_that_a_model_joins_keep_their_integers():
    fn = fn_of(lambda p, x: x @ jnp.concatenate([p["q"], p["k"].T]).T, INT4)
    x = normal((2, 96))
    params = {"q": Q, "k": Q.T}
    serve, serving = aqtlite.convert_function(fn, params, x)
    wanted = jnp.concatenate([Q.dequant(), Q.dequant()])
    assert relative_error(serve(serving, x), x @ wanted.T) < 1e-6


@pytest.mark.parametrize("axis", [0, 2])
def test_stacked_layers_keep_their_integers(axis):
    """Along any axis, all of one size, and stored in another order than their own."""
    cfg, x = config.weight_only(), normal((2, 8))
    model = nn.vmap(
        nn.Dense,
        in_axes=None,
        axis_size=8,
        variable_axes={"params": axis, "aqt": axis},
        split_rngs={"params": True},
    )(8, dot_general=AqtDotGeneral(cfg), use_bias=False)
    q = aqtlite.quantize(normal((8, 8, 8)), cfg.fwd.rhs, 0 if axis else 1)
    serving = convert(model, {"params": {"kernel": q}}, x)
    wanted = jnp.stack([x @ one for one in jnp.moveaxis(q.dequant(), axis, 0)])
    assert relative_error(model.apply(serving, x), wanted) < 1e-6


def test_errors():
    fn = fn_of(lambda p, x: x @ p["w"].T, INT4)
    x = normal((2, 96))
    with pytest.raises(ValueError, match="'w'.* is a QTensor without values"):
        jax.eval_shape(lambda q: aqtlite.convert_function(fn, {"w": q}, x)[1], Q)
    shapes = {"w": jax.ShapeDtypeStruct((96, 32), jnp.float32)}
    for weights, text in (
        ({}, "w has no weight"),
        ({"w": Q}, r"w has the shape \(32, 96\), and the variable \(96, 32\)"),
        ({"w": Q.T, "v": Q}, "v is no variable"),
    ):
        with pytest.raises(CheckpointError, match=text):
            fill(shapes, weights)
    spans = config.update(INT4, {"blocks": config.Blocks(size=2, span_others=True)})
    assert (
        config_of(aqtlite.quantize(normal((3, 4, 5)), spans, (0, 1)), (0, 1)) == spans
    )
    with_minima = dataclasses.replace(Q, offset=Q.scale)
    with pytest.raises(ValueError, match=r"no config has the offsets of QTensor\(int4"):
        config_of(with_minima, axes=1)
    shared = config.Tensor(numerics=INT4.numerics, calib_shared_axes=(0, 2))
    with pytest.raises(ValueError, match=r"no config has blocks of \(2, 1, 4\)"):
        config_of(aqtlite.quantize(normal((2, 3, 4)), shared, axes=2), axes=2)
