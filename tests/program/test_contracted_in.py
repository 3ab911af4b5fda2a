"""Plans that say in which dtypes each contraction runs on a platform."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import aqtlite
import aqtlite.flax.nnx
from aqtlite import Rule, config
from aqtlite.flax import quantize_model
from aqtlite.lowering.forms import panel_products, processor
from aqtlite.program import contracted_in
from tests.common import MATMUL

pytestmark = pytest.mark.code("quick")

X, W = jnp.ones((32, 64)), jnp.ones((64, 32))
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def dtypes(cfg, platform, params=0):
    plan = aqtlite.plan(
        lambda w, x: x @ w, W, X, rules=cfg, params=params, platform=platform
    )
    return plan.contractions[0].contracted_in


def test_forward_and_gradients():
    of_gradients = f"{E5M2} x {E4M3}"
    assert dtypes(config.fp8(), "cuda") == (
        f"cuda: fwd {E4M3} x {E4M3}; dlhs {of_gradients}; drhs {of_gradients}"
    )
    assert dtypes(config.fully_quantized(), "tpu") == "tpu: int8 x int8"
    assert dtypes(config.mxfp8(), "cuda") == f"cuda: {E4M3} x {E4M3}, block-scaled"
    assert dtypes(config.mxfp8(), "cpu") == "cpu: float32 x float32"


@pytest.mark.parametrize(
    "cfg", [config.static_int8(), config.lsq(8), config.smoothquant()]
)
def test_ranges_from_a_state(cfg):
    assert dtypes(cfg, "cuda") == "cuda: int8 x int8"


@pytest.mark.parametrize("has_kernel", [False, True])
@pytest.mark.parametrize("is_slow", [False, True])
def test_what_training_does_not_gain_is_said(is_slow, has_kernel, monkeypatch):
    may_call = has_kernel and panel_products.runs_here()
    monkeypatch.setattr(processor, "has_slow_dots_of_bytes", lambda: is_slow)
    monkeypatch.setattr(panel_products, "runs_here", lambda: may_call)
    said = "; gradients in float32's time without VNNI and the extra 'cpu'"
    text = dtypes(config.fully_quantized(), "cpu")
    assert text.endswith(said) == (is_slow and not may_call)
    assert said not in dtypes(config.weight_only(8), "cpu")
    assert said not in dtypes(config.fully_quantized(), "tpu")


@pytest.mark.parametrize("may_call", [False, True])
def test_int4_weights_are_read_in_pairs_or_by_a_kernel_on_cpus(may_call, monkeypatch):
    has_kernel = may_call and panel_products.runs_here()
    monkeypatch.setattr(panel_products, "runs_here", lambda: has_kernel)
    w, x = jnp.ones((512, 512)), jnp.ones((2, 512))
    text = {
        platform: aqtlite.plan(
            lambda w, x: jnp.einsum("mk,nk", x, w),
            w,
            x,
            rules=config.weight_only(4),
            params=0,
            platform=platform,
        )
        .contractions[0]
        .contracted_in
        for platform in ("cpu", "tpu")
    }
    # The kernel makes the digits of the rows itself.
    form = "float32 x int4, by a kernel" if has_kernel else "int8, int4 in pairs"
    assert form in text["cpu"]
    assert "int4" not in text["tpu"]


def test_it_is_a_column_and_in_json():
    rules = [Rule(path="second", cfg=None), Rule(cfg=config.mxfp4())]

    def two_layers(w, x):
        with jax.named_scope("first"):
            x = x @ w
        with jax.named_scope("second"):
            return x @ w.T

    quantized = aqtlite.quantize_function(two_layers, rules, params=0)
    plan = quantized.plan(W, X, platform="tpu")
    assert [one.contracted_in for one in plan.contractions] == [
        "tpu: bfloat16 x bfloat16",
        "tpu: float32 x float32",
    ]
    assert "contracted in" in str(plan) and "tpu: bfloat16 x bfloat16" in str(plan)
    assert "contracted in" in plan._repr_html_()
    rows = json.loads(plan.to_json())
    assert rows[0]["contracted_in"] == "tpu: bfloat16 x bfloat16"
    plain = quantized.plan(W, X)
    assert "contracted in" not in str(plain)
    assert plain.contractions[0].contracted_in is None


def test_models_of_flax():
    cfg = config.block_fp8(32)
    linen = quantize_model(nn.Dense(32), cfg)
    variables = nn.Dense(32).init(jax.random.key(0), X)
    plan = linen.plan(variables, X, platform="cuda")
    assert plan.contractions[0].contracted_in == f"cuda: {E4M3} x {E4M3}"
    model = aqtlite.flax.nnx.quantize_model(nnx.Linear(64, 32, rngs=nnx.Rngs(0)), cfg)
    plan = aqtlite.flax.nnx.plan(model, X, platform="cuda")
    assert plan.contractions[0].contracted_in == f"cuda: {E4M3} x {E4M3}"


def test_a_weight_on_the_left():
    plan = aqtlite.plan(
        lambda w, x: w.T @ x.T, W, X, rules=config.fp8(), params=0, platform="cuda"
    )
    assert plan.contractions[0].is_exchanged
    assert f"fwd {E4M3} x {E4M3}; dlhs {E5M2}" in plan.contractions[0].contracted_in


def test_what_is_read_is_what_a_step_contracts():
    """The plan lowers contractions by themselves; here the whole step is lowered."""
    for cfg in (config.fp8(), config.nvfp4(), config.w4a8()):
        quantized = aqtlite.quantize_function(lambda w, x: x @ w, cfg, params=0)
        step = jax.value_and_grad(lambda w, x: quantized(w, x).sum(), (0, 1))  # noqa: B023
        for platform in ("cuda", "tpu"):
            found = contracted_in.products(step, W, X, platform=platform)
            said = quantized.plan(W, X, platform=platform).contractions[0].contracted_in
            assert all(one in said for one in found)


def test_refusals():
    with pytest.raises(ValueError, match="platform='gpu' is not known; give one of c"):
        dtypes(config.fp8(), "gpu")
    (rows,) = jax.export.symbolic_shape("n")
    x = jax.ShapeDtypeStruct((rows, 64), jnp.float32)
    with pytest.raises(ValueError, match="has a symbolic shape.*: plan a call with"):
        aqtlite.plan(
            lambda x, w: x @ w, x, W, rules=config.fp8(), params=1, platform="cuda"
        )


def test_exported_programs_hold_no_call_that_may_change():
    """`jax.export` refuses the custom call of block-scaled products."""
    for preset in (config.mxfp8(), config.nvfp4()):
        dot = aqtlite.make_dot_general(preset)
        run = jax.jit(lambda x, w: dot(x, w, MATMUL))  # noqa: B023
        text = jax.export.export(run, platforms=["cuda"])(X, W).mlir_module()
        assert "custom_call @__op" not in text
        assert "tensor<32x64xbf16>, tensor<64x32xbf16>) -> tensor<32x32xf32>" in text
