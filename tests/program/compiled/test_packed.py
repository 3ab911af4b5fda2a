"""Serving programs with packed weights, which give what the jitted function gives."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import aqtlite
from aqtlite import calibration, config
from aqtlite.flax import AqtDotGeneral, convert, quantize_model
from aqtlite.lowering.forms import packed_dot, panel_products, processor
from tests import common
from tests.flax.support import init
from tests.program.compiled.support import compiled_alike

pytestmark = pytest.mark.code("quick")

CFG = config.fully_quantized()
X = common.normal((2, 8))
W = common.normal((8, 8))


@pytest.fixture(autouse=True)
def unsigned(monkeypatch):
    """A processor that multiplies uint8 by int8, and no size that is too small."""
    monkeypatch.setattr(processor, "has_unsigned_dots", lambda: True)
    monkeypatch.setattr(packed_dot, "_worthwhile", lambda rows: 0)


def converted(function, params, *args, cfg=CFG):
    function = aqtlite.quantize_function(function, cfg, params=0)
    return aqtlite.convert_function(function, params, *args)


def weights_of(program):
    """Types of the weights that a program takes: raised by 128, or as they are."""
    taken = [*jax.tree.leaves(program.compiled.in_avals)]
    return sorted(str(x.dtype) for x in taken if "int8" in str(x.dtype))


def test_a_packed_weight_replaces_the_weight():
    program = compiled_alike(*converted(lambda w, x: x @ w, W, X), X)
    assert weights_of(program) == ["uint8"]


def test_weights_of_float_activations():
    function = converted(lambda w, x: x @ w, W, X, cfg=config.weight_only())
    assert weights_of(compiled_alike(*function, X)) == ["uint8"]


def test_a_weight_that_is_shared_is_packed_once():
    def function(w, x):
        return jnp.tanh(x @ w) @ w @ w.T

    serve_fn, serving = converted(function, W, X)
    frozen = [x for x in jax.tree.leaves(serving) if x.dtype == jnp.int8]
    program = compiled_alike(serve_fn, serving, X)
    assert weights_of(program) == ["uint8"] * len(frozen)


def test_a_weight_that_is_also_read_in_float_is_quantized_once():
    def function(params, token):
        x = params[token]
        return x @ params.T

    function = aqtlite.quantize_function(function, CFG, params=0)
    program = compiled_alike(function, common.normal((6, 8)), jnp.array([3, 1]))
    assert weights_of(program) == ["uint8"]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.relu(nn.Dense(8)(nn.LayerNorm()(x))) + x, None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, "aqt": 0}
        rngs = {"params": True}
        layers = nn.scan(Block, variable_axes=axes, split_rngs=rngs, length=3)
        return layers()(x, None)[0]


def test_weights_of_every_step_of_a_scan():
    model = quantize_model(Scanned(), CFG)
    serving = convert(model, init(model, X), X)
    program = compiled_alike(model.apply, serving, X)
    (stack,) = [
        x for x in jax.tree.leaves(program.compiled.in_avals) if x.dtype == jnp.uint8
    ]
    assert stack.shape[0] == 3


def test_weights_of_all_steps_of_a_scan():
    def function(w, x):
        return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=3)[0]

    assert weights_of(compiled_alike(*converted(function, W, X), X)) == ["uint8"]


def test_weights_in_branches_and_while_loops_stay_as_they_are():
    def function(w, x):
        x = lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x, x)
        x = lax.while_loop(lambda x: (x < 9).all(), lambda x: x @ w + 3, x)
        return x @ w

    function = aqtlite.quantize_function(function, CFG, params=0)
    program = aqtlite.compile_serving(function, W, X)
    assert (program(X) == jax.jit(function)(W, X)).all()


def test_variables_that_no_weight_is_made_of_are_taken_as_they_are():
    function = aqtlite.quantize_function(
        lambda v, x: (x @ v["w"] + jax.random.uniform(v["key"]), v["count"] + 1),
        CFG,
        params=0,
    )
    unused = {"unused": jax.random.key(1), "count": 3 * jnp.ones((), jnp.int32)}
    compiled_alike(function, {"w": W, "key": jax.random.key(0), **unused}, X)


def test_a_decoder_updates_its_cache_in_place():
    """The cache is an argument and a result, and donated."""
    model = nn.Dense(8, dot_general=AqtDotGeneral(CFG))
    serving = convert(model, init(model, X), X)

    def step(serving, cache, position, x):
        x = model.apply(serving, x)
        return lax.dynamic_update_index_in_dim(cache, x, position, 0), x

    shapes = jax.ShapeDtypeStruct((4, 2, 8), jnp.float32), jnp.int32(0), X
    program = aqtlite.compile_serving(step, serving, *shapes, donate_argnums=(1,))
    cache, wanted, x = jnp.zeros((4, 2, 8)), jnp.zeros((4, 2, 8)), X
    for position in range(3):
        given = cache
        wanted, _ = jax.jit(step)(serving, wanted, jnp.int32(position), x)
        cache, x = program(cache, jnp.int32(position), x)
        assert given.is_deleted()
    assert (cache == wanted).all()
    assert cache[:3].any(axis=(1, 2)).all()


def test_an_export_takes_the_variables_as_converted():
    serve_fn, serving = converted(lambda w, x: x @ w, W, X)
    program = compiled_alike(serve_fn, serving, X)
    exported = program.export(["cpu"])
    leaves = tuple(jax.tree.leaves(serving))
    assert (exported.call(leaves, X) == program(X)).all()
    given = [x.dtype for x in exported.in_avals]
    assert jnp.uint8 not in given


def mlp(params, x):
    for kernel, bias in params:
        x = jax.nn.relu(x @ kernel) + bias * x
    return x


def of_mlp(width, layers=3):
    return [
        (common.normal((width, width), i), common.normal((width,), 9 + i))
        for i in range(layers)
    ]


def test_scales_of_all_layers_are_one_argument():
    x = common.normal((1, 8))
    function, serving = converted(mlp, of_mlp(8), x)
    taken = jax.tree.leaves(compiled_alike(function, serving, x).compiled.in_avals)
    # Neither scales nor markers of the frozen parameters of three layers.
    assert len(taken) == len(jax.tree.leaves(serving)) - 3 - 3 + 1 + 1


@pytest.mark.parametrize(("width", "dtype"), [(128, "float32"), (136, "int8")])
def test_without_a_kernel_one_row_meets_few_weights_in_float(width, dtype, monkeypatch):
    monkeypatch.setattr(panel_products, "runs_here", lambda: False)
    monkeypatch.setattr(packed_dot, "_worthwhile", lambda rows: 2**30)
    x = common.normal((1, width))
    program = compiled_alike(*converted(mlp, of_mlp(width, layers=1), x), x)
    taken = jax.tree.leaves(program.compiled.in_avals)
    assert {str(y.dtype) for y in taken if y.shape == (width, width)} == {dtype}


@pytest.mark.code("users")
@pytest.mark.parametrize("width", [8, 64, 136, 256])
def test_a_row_is_served_as_it_was_trained_among_others(width):
    rows, params = common.normal((3, width), 5), of_mlp(width)
    trained = jax.jit(aqtlite.quantize_function(mlp, CFG, params=0))(params, rows)
    function, serving = converted(mlp, params, rows)
    program = compiled_alike(function, serving, rows[1:2])
    assert (program(rows[1:2]) == trained[1:2]).all()


CALIBRATIONS = {
    "default": CFG.fwd.lhs.calibration,
    "constant": calibration.Constant(magnitude=2.0),
    "clipped": calibration.AbsMax(clipping_scale=0.9),
}


@pytest.mark.code("users")
@pytest.mark.parametrize("width", [2, 8, 64, 136])
@pytest.mark.parametrize("columns", [1, 24])
def test_a_bias_is_added_to_rounded_products(width, columns):
    """LLVM contracts them to fused multiply-adds where it sees that a scale is
    positive."""
    params = common.normal((width, columns)), common.normal((columns,), 1)
    row = common.normal((1, width), 2)

    def layers(params, x):
        out = {}
        for name in CALIBRATIONS:
            w, b = params[name]
            with jax.named_scope(name):
                out[name] = x @ w + b, x @ w * 3.0 - b
        return out

    rules = [
        aqtlite.Rule(path=name, cfg=config.update(CFG, {"fwd.lhs.calibration": one}))
        for name, one in CALIBRATIONS.items()
    ]
    params = dict.fromkeys(CALIBRATIONS, params)
    function, serving = converted(layers, params, row, cfg=rules)
    trained = jax.jit(aqtlite.quantize_function(layers, rules, params=0))(params, row)
    got = compiled_alike(function, serving, row)(row)
    jax.tree.map(np.testing.assert_array_equal, got, trained)
