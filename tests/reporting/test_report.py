"""Reports agree with an independent reading of compiled programs, and tell faults."""

import functools
import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from aqt.jax.v2 import config as aqtp_config
from flax import nnx
from jax import lax
from jax.experimental import pallas
from qwix._src.core import dot_general_qt

import aqtlite
from aqtlite import calibration, config, kv_cache, report, testing
from aqtlite.flax import AqtDotGeneral, convert, quantize_model
from tests.common import MATMUL, nearest, normal
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

X = normal((16, 32))
INT8 = aqtlite.make_dot_general(nearest())


class Mlp(nn.Module):
    """Two layers, of which one may stay in float."""

    up: object = None
    down: object = None

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(64, dot_general=AqtDotGeneral(self.up), name="up")(x))
        return nn.Dense(24, dot_general=AqtDotGeneral(self.down), name="down")(x)


@functools.cache
def gradient_of(up, down):
    model = Mlp(up, down)
    variables = jax.eval_shape(model.init, jax.random.key(0), X)

    def loss(variables, x):
        return jnp.sum(model.apply(variables, x) ** 2)

    fn = jax.jit(jax.value_and_grad(loss))
    return report(fn, variables, X), fn.lower(variables, X).compile().as_text()


def dots_in(text):
    """Result dtypes of all products in a program, by another reading of it."""
    product = r"(?:dot\(|custom-call\(.*aqtlite_panels)"
    return re.findall(rf"= (\w+)\[[\d,]*\]\S* {product}", text)


def described(found):
    return [(x.path, x.role, x.asked, x.runs_in) for x in found.contractions]


def test_one_layer_left_in_float():
    found, text = gradient_of(nearest(), None)
    assert sorted(dots_in(text)) == ["f32"] * 3 + ["s32"] * 2
    up, down = ("Mlp/up", "Mlp/down")
    assert described(found) == [
        (up, "forward", "int8", "int8"),
        (down, "forward", "float32", "float32"),
        (down, "gradient", "float32", "float32"),
        (down, "gradient", "float32", "float32"),
        (up, "gradient", "int8", "int8"),
    ]
    macs = [16 * 32 * 64, 16 * 64 * 24]
    assert found.macs == 2 * macs[0] + 3 * macs[1]
    assert found.share("int8") == pytest.approx(2 * macs[0] / found.macs)
    assert found.share("float32") == pytest.approx(3 * macs[1] / found.macs)
    assert found.share("int4") == 0
    assert found.memory.arguments >= 4 * (16 * 32 + 32 * 64 + 64 * 24)
    assert found.memory.peak >= found.memory.arguments
    assert not found.others


def test_what_the_backward_pass_reads():
    # In float, the activation of the second layer and the mask of relu; quantized,
    # integers and scales in their place.
    in_float, quantized = (
        gradient_of(cfg, None)[0].saved_bytes for cfg in (None, nearest())
    )
    wanted = 16 * 64 * 4 + 16 * 64 + 16 * 24 * 4
    assert in_float == wanted
    assert quantized == wanted + 16 * 32 + 16 * 4
    served, _ = report(Mlp(), jax.eval_shape(Mlp().init, jax.random.key(0), X), X), None
    assert served.saved_bytes == 0


def test_compare_and_estimate():
    float_one, int8 = gradient_of(None, None)[0], gradient_of(nearest(), None)[0]
    changes = float_one.compare(int8).changed()
    assert [(x.path, x.role) for x in changes] == [
        ("Mlp/up", "forward"),
        ("Mlp/up", "gradient"),
    ]
    assert "2 of 5 contractions differ" in repr(float_one.compare(int8))
    assert len(json.loads(int8.compare(float_one).to_json())["changes"]) == 5
    estimates = int8.estimate("H100")
    # Tiny operands: passes over them cost more than products save.
    assert estimates[0].is_float_faster
    assert not any(x.is_float_faster for x in float_one.estimate("TPU v5e"))
    with pytest.raises(ValueError, match="no rates of a device 'abacus' are known"):
        int8.estimate("abacus")


def test_measured_times():
    found = report(lambda x, w: jnp.tanh(x @ w) @ w.T, X, normal((32, 24)))
    assert [one.seconds for one in found.contractions] == [None, None]
    w = normal((256, 256))
    found = report(lambda w: jnp.tanh(w @ w) @ w, w, measured_runs=2)
    assert all(one.seconds > 0 for one in found.contractions)
    assert " us" in repr(found)
    with pytest.raises(ValueError, match="needs arrays for all arguments"):
        report(jnp.sin, jax.ShapeDtypeStruct((2,), "float32"), measured_runs=2)


def test_data_and_table():
    found, _ = gradient_of(nearest(), None)
    data = json.loads(found.to_json())
    assert data["shares"] == pytest.approx(found.shares)
    assert sum(row["share"] for row in data["contractions"]) == pytest.approx(1)
    table = repr(found)
    assert "Mlp/down" in table and "float32" in table and "memory:" in table
    assert found._repr_html_().count("<tr>") == 6


def test_served_weights_are_frozen():
    dense = nn.Dense(24, dot_general=AqtDotGeneral(nearest()))
    params = {"kernel": normal((32, 24)), "bias": jnp.zeros(24)}
    found = report(dense, convert(dense, {"params": params}, X), X)
    assert [x.is_frozen for x in found.contractions] == [True]
    assert found.share("int8") == 1
    assert not [x for x in found.copies if x.kind == "float copy"]


@pytest.mark.parametrize(
    "cfg", [config.w4a8(), config.weight_only(4), config.fully_quantized(fwd_bits=16)]
)
def test_served_weights_of_few_and_many_bits(cfg):
    """Those of 4 bits by a kernel of this library, where its extra is installed."""
    model = quantize_model(nn.Dense(32), cfg)
    variables = init(model, X)
    serving = convert(model, variables, X)
    [one] = report(model, serving, X).contractions
    assert one.runs_in == "int8" and one.is_frozen
    # Floats and int16 are three digits of int8 each.
    assert one.compiled_macs >= one.macs >= 16 * 32 * 32
    testing.assert_quantized(model, serving, X)


def test_a_lowered_program_of_another_platform():
    model = Mlp(config.fp8(), None)
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    here, there = (
        report(model, variables, X),
        report(model, variables, X, platform="cuda"),
    )
    assert here.contractions[0].asked == "float8_e4m3fn"
    assert here.contractions[0].runs_in in ("float32", "bfloat16")  # by processor
    assert here.contractions[0].fell_back
    assert there.contractions[0].runs_in == "float8_e4m3fn"
    assert there.memory is None and "not compiled" in repr(there)


@pytest.mark.parametrize("platform", [None, "cuda"])
def test_a_jitted_function_called_in_several_scopes(platform):
    """A scope may have the name of the function around it, as "model" has."""
    layer = jax.jit(lambda w, x: jnp.tanh(INT8(x, w, MATMUL)))

    def model(w, x):
        with jax.named_scope("model"):
            x = layer(w, x)
        with jax.named_scope("loop"):
            x, _ = lax.scan(lambda x, _: (layer(w, x) @ w, None), x, None, length=3)
        return x @ w

    found = report(model, jnp.ones((32, 32)), X, platform=platform)
    assert [(x.path, x.runs_in, x.times) for x in found.contractions] == [
        ("model", "int8", 1),
        ("loop", "int8", 3),
        ("loop#1", "float32", 3),
        ("", "float32", 1),
    ]
    assert found.contractions[0].range_reductions == 2


def test_loops_and_recomputation():
    def loss(params, x):
        step = jax.checkpoint(lambda x, w: (jnp.sin(INT8(x, w, MATMUL)), None))
        return jnp.sum(lax.scan(step, x, params["ws"])[0])

    params = {"ws": jax.ShapeDtypeStruct((3, 32, 32), "float32")}
    found = report(jax.grad(loss), params, X, params=0)
    assert {x.times for x in found.contractions} == {3}
    assert {x.macs for x in found.contractions} == {3 * 16 * 32 * 32}
    roles = [x.role for x in found.contractions]
    assert sorted(roles) == ["forward", "gradient", "gradient", "recomputed"]
    assert found.contractions[0].path == "ws"


def test_a_while_loop_whose_length_only_the_compiler_knows():
    found = report(lambda w, x: lax.fori_loop(0, 5, lambda _, x: x @ w, x), X.T @ X, X)
    [one] = found.contractions
    assert (one.times, one.macs) == (5, 5 * 16 * 32 * 32)


class Stack(nn.Module):
    """One dense layer, scanned."""

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            lambda dense, x, _: (dense(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        return scan(nn.Dense(32, name="layers"), x, None)[0]


def test_scanned_layers_of_a_quantized_model():
    """JAX drops the scope around a loop if it ends with a colon."""
    model = quantize_model(Stack(), nearest())
    found = report(model, jax.eval_shape(model.init, jax.random.key(0), X), X)
    [one] = found.contractions
    assert (one.path, one.runs_in, one.times) == ("Stack/layers", "int8", 3)
    assert found.others == ()


CONV_SHAPES = (2, 6, 6, 4), (3, 3, 4, 8)


@pytest.mark.parametrize("cfg", [None, nearest()], ids=["float", "int8"])
def test_a_convolution(cfg):
    conv = aqtlite.make_conv_general_dilated(cfg)
    numbers = ("NHWC", "HWIO", "NHWC")

    def loss(x, k):
        return jnp.sum(conv(x, k, (2, 2), "SAME", dimension_numbers=numbers) ** 2)

    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in CONV_SHAPES]
    found = report(jax.grad(loss, (0, 1)), *args)
    assert [x.op for x in found.contractions] == ["conv_general_dilated"] * 3
    assert {x.macs for x in found.contractions} == {2 * 3 * 3 * 8 * 36}
    assert found.share("float32" if cfg is None else "int8") == 1


def test_experts_run_densely():
    experts = aqtlite.make_ragged_dot(nearest())
    shapes = [(8, 16), (4, 16, 12)]
    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    found = report(experts, *args, jax.ShapeDtypeStruct((4,), "int32"))
    [one] = found.contractions
    assert (one.op, one.asked, one.macs) == ("ragged_dot", "int8", 8 * 16 * 12)
    plain = report(lax.ragged_dot, *args, jax.ShapeDtypeStruct((4,), "int32"))
    [other] = plain.contractions
    assert other.compiled_macs == 4 * other.macs
    assert "4 times the products" in repr(plain)


@pytest.mark.parametrize("cfg", [None, nearest()])
def test_gradients_of_experts(cfg):
    counts = jnp.array([10, 2, 0, 20])
    ragged_dot = lax.ragged_dot if cfg is None else aqtlite.make_ragged_dot(cfg)

    def loss(x, experts):
        return jnp.sum(ragged_dot(x, experts, counts) ** 2)

    shapes = [(32, 64), (4, 64, 24)]
    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    found = report(jax.grad(loss, (0, 1)), *args)
    assert [one.op for one in found.contractions] == ["ragged_dot"] * 3
    assert found.share("float32" if cfg is None else "int8") == 1


def of_qwix(x, w):
    cfg = dot_general_qt.DotGeneralQtConfig(
        **dict.fromkeys(("lhs_qtype", "rhs_qtype"), "int8"),
        **dict.fromkeys(("dlhs_grad_qtype", "drhs_grad_qtype"), "int8"),
    )
    return dot_general_qt.dot_general_qt(x, w, MATMUL, cfg)


def of_aqt(x, w):
    cfg = aqtp_config.fully_quantized(use_stochastic_rounding=False)
    return cfg(x, w, MATMUL)


@pytest.mark.parametrize("peer", [of_qwix, of_aqt])
def test_a_peer(peer):
    fn = jax.jit(jax.grad(lambda x, w: jnp.sum(peer(x, w) ** 2), (0, 1)))
    w = normal((32, 24))
    found = report(fn, X, w)
    assert [x.asked for x in found.contractions] == ["int8"] * 3
    text = fn.lower(X, w).compile().as_text()
    assert dots_in(text) == ["s32"] * 3
    # Wide operands of the gradient that XLA could not give to a kernel for int8.
    wide = len(re.findall(r"= s32\[(?:32,16|16,32|16,24|32,24)\]\S* convert\(", text))
    assert (found.share("int32") > 0) == (wide > 0)
    assert found.share("int8") + found.share("int32") == pytest.approx(1)


def test_what_rules_do_not_see():
    def kernel(x, w, out):
        out[...] = x[...] @ w[...]

    def everything(x, w):
        out = jax.ShapeDtypeStruct((16, 24), "float32")
        call = pallas.pallas_call(kernel, out, interpret=True)
        on_host = jax.pure_callback(
            lambda x, w: np.asarray(x) @ np.asarray(w), out, x, w
        )
        return call(x, w) + on_host + jnp.sum(x[:, :, None] * w, 1)

    found = report(everything, X, normal((32, 24)))
    assert {x.op for x in found.contractions} >= {"pure_callback", "reduce_sum"}
    assert [x.macs for x in found.contractions if x.op != "pure_callback"] == [
        16 * 32 * 24
    ] * 2
    assert all(x.is_float for x in found.contractions)
    assert "cannot see what pure_callback calls" in repr(found)


def test_statistics_are_no_contractions():
    found = report(lambda x: (jnp.sum(x * x), jnp.mean(x * jnp.ones(32), 0)), X)
    assert not found.contractions and not found.shares
    assert found.share("int8") == 0


def test_a_float_copy_and_a_transposed_copy():
    def served(w, scale, x):
        return x @ (w.astype(jnp.float32) * scale)

    w, scale = jnp.ones((32, 24), jnp.int8), jnp.ones(24)
    [copy] = report(served, w, scale, X).copies
    assert (copy.kind, copy.argument) == ("float copy", "w")
    assert copy.bytes == 4 * 32 * 24
    [copy] = report(lambda x: x.T, X).copies
    assert (copy.kind, copy.type) == ("transposed copy", "float32[32,16]")


def test_an_operand_quantized_twice():
    def twice(x):
        return [jnp.round(x / s).astype(jnp.int8) for s in (jnp.max(x), jnp.min(x))]

    [copy] = report(twice, X).copies
    assert (copy.kind, copy.type) == ("quantized again", "int8[16,32]")

    def loss(x, w):
        with jax.named_scope("layer"):
            return jnp.sum(afresh(x, w, MATMUL) ** 2)

    afresh = aqtlite.make_dot_general(nearest(use_fwd_quant=False))
    copies = report(jax.grad(loss, (0, 1)), X, normal((32, 24))).copies
    again = [(x.path, x.type) for x in copies if x.kind == "quantized again"]
    assert ("layer", "int8[32,24]") in again and {path for path, _ in again} == {
        "layer"
    }


def test_models_of_nnx():
    model = nnx.eval_shape(lambda: nnx.Linear(32, 8, rngs=nnx.Rngs(0)))
    assert report(model, X).share("float32") == 1
    float_model = nn.Dense(8)
    quantized = quantize_model(float_model, nearest())
    variables = jax.eval_shape(float_model.init, jax.random.key(0), X)
    assert report(quantized, variables, X).share("int8") == 1


@pytest.mark.parametrize("compile_step", [lambda step: step, nnx.jit])
def test_a_step_that_updates_nnx_objects(compile_step):
    def step(model, optimizer, x):
        gradient = nnx.grad(lambda model: jnp.sum(model(x) ** 2))(model)
        optimizer.update(model, gradient)

    model = nnx.Linear(32, 8, rngs=nnx.Rngs(0), dot_general=INT8)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    found = report(compile_step(step), model, optimizer, X, params=0)
    assert found.share("int8") == 1 and len(found.contractions) == 2
    assert not found.shared_along(0)
    assert found.memory.outputs >= 4 * (32 + 1) * 8
    assert not isinstance(model.kernel[...], jax.core.Tracer)


def test_an_operand_made_of_a_random_key():
    def noisy(key, w):
        return jax.random.bits(key, (16, 32), jnp.uint8).astype(jnp.int8) @ w

    [one] = report(noisy, jax.random.key(0), jnp.ones((32, 24), jnp.int8)).contractions
    assert one.asked == "int8"


def attention(dot_general, x, w):
    def product(equation, lhs, rhs):
        return jnp.einsum(equation, lhs, rhs, _dot_general=dot_general)

    with jax.named_scope("values"):
        values = product("btd,dm->btm", x, w)
    with jax.named_scope("scores"):
        scores = product("btd,bsd->bts", x, x)
    scores = jnp.where(jnp.tri(6, dtype=bool), scores, -1e9)
    with jax.named_scope("mixed"):
        return product("bts,bsm->btm", jax.nn.softmax(scores), values)


SIDES = ("lhs", "rhs")
PER_TENSOR = {"fwd.lhs.calib_shared_axes": "per_tensor"}


@pytest.mark.parametrize(
    ("changes", "examples", "positions"),
    [
        ({}, [], ["mixed"]),
        (PER_TENSOR, ["values", "scores", "mixed"], ["values", "scores", "mixed"]),
        ({f"fwd.{x}.calibration": calibration.Constant(3.0) for x in SIDES}, [], []),
    ],
    ids=["per channel", "per tensor", "static"],
)
def test_what_scales_see(changes, examples, positions):
    """Values of all positions share a scale, so that earlier ones see later ones."""
    cfg = config.update(nearest(), changes)
    fn = functools.partial(attention, aqtlite.make_dot_general(cfg))
    given = normal((2, 6, 8)), normal((8, 8), 1)
    found = report(fn, *given, params=1)
    names = [
        [one.path.partition("/")[0] for one in found.shared_along(axis)]
        for axis in (0, 1)
    ]
    assert names == [examples, positions]
    one = found.contractions[0]
    assert [(x.side, x.is_dynamic) for x in one.scales] == [
        ("lhs", "fwd.rhs.calibration" not in changes),
        ("rhs", False),
    ]
    assert ("shared along axis 1 of argument 0" in repr(found)) == bool(positions)
    causal = functools.partial(testing.assert_causal, fn, *given, argnums=0)
    independent = functools.partial(testing.assert_independent, fn, *given, argnums=0)
    # What the report derives is what is found when it runs.
    for names, noun, check in (
        (positions, "positions", causal),
        (examples, "examples", independent),
    ):
        if names:
            with pytest.raises(AssertionError, match=f"{noun} share the scales of its"):
                check()
        else:
            check()


def test_passes_around_contractions():
    """A maximum of each operand; in the gradients two transposed integer operands."""
    found, text = gradient_of(nearest(), nearest())
    # Barriers of scales are reductions to several arrays.
    wanted = r"ROOT %?[\w.]+ = f32\[[^\n]*jit\(_quantize\)/reduce"
    assert len(re.findall(wanted, text)) == 7
    ranges = {(one.path, one.role): one.range_reductions for one in found.contractions}
    assert ranges == {
        (f"Mlp/{name}", role): 1 if (name, role) == ("up", "gradient") else 2
        for name in ("up", "down")
        for role in ("forward", "gradient")
    }
    in_float = gradient_of(None, None)[0]
    assert not any(one.range_reductions for one in in_float.contractions)
    assert any(one.transpositions for one in found.contractions)
    assert not in_float.contractions[0].scales
    # The body of a function that is called twice passes twice.
    layer = jax.jit(lambda w, x: jnp.tanh(INT8(x, w, MATMUL)))
    twice = report(
        lambda w, x: layer(w, layer(w, x)), jnp.ones((32, 32)), X, platform="tpu"
    )
    assert [one.range_reductions for one in twice.contractions] == [4, 4]


def test_wrong_arguments():
    with pytest.raises(TypeError, match="got int"):
        report(3)
    with pytest.raises(ValueError, match="platform='abacus' is not known"):
        report(jnp.sin, X, platform="abacus")
    with pytest.raises(ValueError, match="params=4 names the argument 4"):
        report(jnp.sin, X, params=4)
    with pytest.raises(TypeError, match=r"report\(Dense\(...\), variables, \*args"):
        report(nn.Dense(8), X)
    for runs in (-1, 2.5):
        with pytest.raises(ValueError, match="measured_runs must be a number of runs"):
            report(jnp.sin, X, measured_runs=runs)
    found = report(jnp.matmul, X, X.T)
    assert found.share(jnp.float32) == found.share("float32") == 1
    assert found.share("int8 x float32") == found.share("not found") == 0
    with pytest.raises(TypeError, match="int9"):
        found.share("int9")
    with pytest.raises(TypeError, match="in place of the Compiled"):
        report(jax.jit(jnp.sin).lower(X).compile(), X)
    with pytest.raises(ValueError, match="axis counts from the first"):
        found.shared_along(-2)
    with pytest.raises(ValueError, match="no rates of a device None"):
        found.estimate(None)
    with pytest.raises(TypeError, match="compare takes another report"):
        found.compare(X)
    with pytest.raises(TypeError, match="taps must be those of one call"):
        found.to_html("page.html", taps={0: None})
    with pytest.raises(TypeError, match="'up' needs its floats and a QTensor"):
        found.to_html("page.html", operands={"up": X})


def test_a_cache_of_few_bits_is_contracted_in_int8():
    cfg, x = kv_cache.config_for(4), jnp.ones((1, 64, 2, 16))
    cache = kv_cache.append(kv_cache.empty(x.shape, x.dtype, cfg), x, x, cfg)
    attend = jax.jit(lambda cache, x: kv_cache.attend(x, cache, cfg))
    found = report(attend, cache, x[:, -1:])
    assert [one.runs_in for one in found.contractions] == ["int8", "int8"]
    assert found.share("int8") == 1
