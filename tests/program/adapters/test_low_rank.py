"""Adapters of functions by rules: products, frozen weights, states, merging, errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import aqtlite
from aqtlite import Rule, calibration, config, rules
from aqtlite.errors import RulesError
from tests.common import assert_same, normal, quick_jit, relative_error

pytestmark = pytest.mark.code("quick")

LORA = config.Lora(rank=2, alpha=3)
INT8 = config.weight_only(8)
X, W = normal((4, 8), 1), normal((8, 6), 2)


def adapted(fn, cfg=None, lora=LORA, **kwargs):
    rule = Rule(cfg=cfg, adapter=lora)
    return aqtlite.quantize_function(fn, [rule], params=0, **kwargs)


def trained(state, seed=5):
    """A state with values in all parameters."""
    return jax.tree.map(lambda a: a + 0.3 * normal(a.shape, seed), state)


def matmul(w, x):
    return x @ w


def conv(w, x, **kwargs):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, w, (2, 1), "SAME", dimension_numbers=numbers, **kwargs
    )


CROSSED = (((3,), (0,)), ((0, 1), (3, 1)))
CONTRACTIONS = {
    "matrix": (matmul, (8, 6), (4, 8)),
    "weight first": (lambda w, x: jnp.einsum("kn,bk->nb", w, x), (8, 6), (4, 8)),
    "batch": (lambda w, x: lax.dot_general(x, w, CROSSED), (7, 3, 4, 2), (2, 3, 5, 7)),
    "two axes": (lambda w, x: jnp.einsum("abc,bdc->ad", x, w), (3, 5, 7), (4, 3, 7)),
    "moved": (lambda w, x: x @ w.reshape(8, 6, 2)[..., 1].T, (48, 2), (4, 6)),
    "convolution": (conv, (3, 3, 4, 6), (2, 6, 5, 4)),
    "pointwise": (
        lambda w, x: lax.conv_general_dilated(
            x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        (1, 1, 4, 6),
        (2, 6, 5, 4),
    ),
    "experts": (
        lambda w, x: lax.ragged_dot(x, w, jnp.array([1, 0, 3])),
        (3, 8, 6),
        (4, 8),
    ),
}


@pytest.mark.parametrize("case", CONTRACTIONS)
def test_the_product_is_that_of_the_merged_weight(case):
    fn, shape, shape_of_x = CONTRACTIONS[case]
    w, x = normal(shape, 1), normal(shape_of_x, 2)
    fn_q = adapted(fn)
    state = fn_q.init_state(w, x)
    assert relative_error(quick_jit(fn_q)(state, w, x)[0], fn(w, x)) < 1e-6
    state = trained(state)
    out, after = quick_jit(fn_q)(state, w, x)
    assert_same(after, state)
    merged = aqtlite.merge_adapters(fn_q, w, x, state=state)
    assert relative_error(out, fn(merged, x)) < 1e-6
    assert relative_error(out, fn(w, x)) > 0.01


def test_results_have_the_dtype_of_the_model():
    dtype = jnp.bfloat16
    w, x = W.astype(dtype), X.astype(dtype)
    fn_q = adapted(matmul, INT8)
    state = trained(fn_q.init_state(w, x))
    out, _ = fn_q(state, w, x)
    assert out.dtype == dtype
    of_float, _ = fn_q(state, W, X)
    assert relative_error(out, of_float) < 0.05


@pytest.mark.parametrize("cfg", [None, INT8, config.fully_quantized()])
def test_weights_are_frozen(cfg):
    fn_q = adapted(matmul, cfg)
    plain = aqtlite.quantize_function(matmul, [Rule(cfg=cfg)], params=0)
    state = fn_q.init_state(W, X)
    out, _ = quick_jit(fn_q)(state, W, X)
    np.testing.assert_array_equal(out, quick_jit(plain)(W, X))

    def loss(state, w, x):
        return jnp.sum(fn_q(state, w, x)[0] ** 2)

    gradients = jax.grad(loss)(trained(state), W, X)
    assert all(jnp.any(g != 0) for g in jax.tree.leaves(gradients))
    for transform in (lambda f: f, jax.checkpoint):
        with pytest.raises(TypeError, match="'0', which is frozen"):
            jax.grad(transform(lambda w: loss(state, w, X)))(W)


def test_no_gradient_of_a_weight_is_computed():
    fn_q = adapted(matmul)
    state = fn_q.init_state(W, X)
    gradient = jax.grad(lambda s, x: jnp.sum(fn_q(s, W, x)[0] ** 2), argnums=(0, 1))
    closed = jax.make_jaxpr(gradient)(state, X)
    shapes = [
        eqn.outvars[0].aval.shape
        for eqn in closed.eqns
        if eqn.primitive.name == "dot_general"
    ]
    assert shapes and W.shape not in shapes and W.T.shape not in shapes


def test_adapters_train_beside_integers():
    fn_q = adapted(matmul, INT8)
    state = fn_q.init_state(W, X)
    serve, serving = aqtlite.convert_function(fn_q, W, X, state=state)
    assert aqtlite.is_frozen(serving["params"])

    def loss(state):
        return jnp.mean((serve({**serving, "state": state}, X) - 1) ** 2)

    step = quick_jit(jax.value_and_grad(loss))
    first, gradients = step(state)
    for _ in range(20):
        state = jax.tree.map(lambda a, g: a - 0.05 * g, state, gradients)
        last, gradients = step(state)
    assert last < first / 2
    serving = {**serving, "state": state}
    merged = aqtlite.merge_adapters(serve, serving, X)
    assert relative_error(X @ merged, serve(serving, X)) < 1e-5


def layers(params, x):
    def body(x, w):
        return jnp.tanh(x @ w), None

    return lax.scan(jax.checkpoint(body), x, params)[0]


def rotated(cfg):
    return config.update(cfg, {"fwd.rotation": config.Hadamard(size=8, fit=True)})


SMOOTHED = config.update(
    INT8,
    {
        "fwd.smoothing": config.Smoothing(
            lhs_calibration=calibration.MaxOverBatches(), po2_scale=False
        )
    },
)


@pytest.mark.parametrize("case", CONTRACTIONS)
def test_a_merged_weight_is_not_rotated(case):
    fn, shape, shape_of_x = CONTRACTIONS[case]
    w, x = normal(shape, 1), normal(shape_of_x, 2)
    fn_q = adapted(fn, rotated(INT8))
    state = trained(fn_q.init_state(w, x))
    merged = aqtlite.merge_adapters(fn_q, w, x, state=state)
    assert relative_error(fn(merged, x), fn_q(state, w, x)[0]) < 1e-5
    serve, serving = aqtlite.convert_function(fn_q, w, x, state=state)
    merged = aqtlite.merge_adapters(serve, serving, x)
    assert relative_error(fn(merged, x), serve(serving, x)) < 1e-5


@pytest.mark.parametrize("cfg", [SMOOTHED, rotated(SMOOTHED)])
def test_a_merged_weight_is_not_smoothed(cfg):
    w, x = normal((3, 8, 8), 3), X * jnp.array([1, 20, *[1] * 6])
    fn_q = adapted(layers, cfg)
    state = fn_q.gather(fn_q.init_state(w, x), w, x)
    state = {**state, "params": trained(state["params"])}
    reports = []
    merged = aqtlite.merge_adapters(fn_q, w, x, state=state, report=reports.append)
    out = fn_q.evaluate(state, (w, x), {})
    assert relative_error(layers(merged, x), out) < 1e-5
    assert all(one.rounding_error < 0.1 for one in reports[0].weights)
    serve, serving = aqtlite.convert_function(fn_q, w, x, state=state)
    merged = aqtlite.merge_adapters(serve, serving, x)
    assert relative_error(layers(merged, x), out) < 1e-5


def test_scanned_layers_have_stacked_adapters():
    w = normal((3, 8, 8), 3)
    fn_q = adapted(layers, INT8)
    state = fn_q.init_state(w, X)
    (entry,) = state["params"].values()
    assert entry["adapter"]["lora_a"].shape == (3, 8, 2)
    assert jnp.all(jnp.std(entry["adapter"]["lora_a"], axis=0) > 0)
    state = trained(state)
    out, _ = quick_jit(fn_q)(state, w, X)
    serve, serving = aqtlite.convert_function(fn_q, w, X, state=state)
    # The adapter's products are summed in float, otherwise in another program.
    assert relative_error(serve(serving, X), out) < 1e-5
    reports = []
    merged = aqtlite.merge_adapters(fn_q, w, X, state=state, report=reports.append)
    assert relative_error(layers(merged, X), out) < 1e-5
    (one,) = reports[0].weights
    assert 0.1 < one.update < 10 and 0 < one.rounding_error < 0.1
    assert "rounding error" in str(reports[0])


def test_each_row_may_have_adapters_of_its_own():
    fn_q = adapted(matmul, INT8)
    states = [trained(fn_q.init_state(W, X), seed) for seed in range(4)]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *states)
    run = quick_jit(lambda state, x: fn_q(state, W, x)[0])
    rows = quick_jit(jax.vmap(lambda state, x: fn_q(state, W, x)[0]))(stacked, X)
    for state, x, row in zip(states, X, rows, strict=True):
        assert relative_error(row, run(state, x[None])[0]) < 1e-5


def test_bits_depend_on_values_alone():
    fn_q = adapted(matmul, INT8, invariant=True)
    state = trained(fn_q.init_state(W, X))
    run = quick_jit(lambda x: fn_q(state, W, x)[0])
    np.testing.assert_array_equal(run(X)[2:3], run(X[2:3]))


def test_dropout_needs_a_key():
    fn_q = adapted(matmul, lora=config.Lora(2, 3, dropout=0.5))
    x = jnp.ones((64, 8))
    state = trained(fn_q.init_state(W, x))
    mean, _ = fn_q(state, W, x)
    keys = [{**state, "dropout": jax.random.key(i)} for i in (0, 0, 1)]
    one, same, other = (fn_q(given, W, x)[0] for given in keys)
    np.testing.assert_array_equal(one, same)
    assert jnp.any(one != other) and jnp.any(one[0] != one[1])
    update = mean - x @ W
    found = (one - x @ W).mean(0)
    assert relative_error(found, update[0]) < 0.5


def test_other_seeds_start_elsewhere():
    one = adapted(matmul).init_state(W, X)["params"]
    other = adapted(matmul, lora=config.Lora(2, 3, seed=1)).init_state(W, X)["params"]
    a, b = (next(iter(x.values()))["adapter"]["lora_a"] for x in (one, other))
    assert jnp.any(a != b)
    assert jnp.max(jnp.abs(a)) <= 8**-0.5 and jnp.std(a) > 0.1


def test_scales():
    assert config.Lora(4, 8).scale == 2
    assert config.Lora(4, 8, is_rank_stabilized=True).scale == 4


def test_rules_name_parameters():
    def lora(p, x):
        with jax.named_scope("layer"):
            return x @ p["w"] + x @ p["lora_a"] @ p["lora_b"]

    p = {"w": W, "lora_a": normal((8, 2)), "lora_b": normal((2, 6))}
    chosen = [Rule(parameter="lora_.*", cfg=None), Rule(cfg=INT8)]
    fn_q = aqtlite.quantize_function(lora, chosen, params=0)
    quantized = fn_q.plan(p, X).quantized()
    assert [one.parameters for one in quantized] == [("w",)]
    with pytest.raises(RulesError, match=r"(?s)parameter='b'.*parameters: w"):
        rule = Rule(parameter="b", cfg=None)
        aqtlite.quantize_function(lora, [rule], params=0).plan(p, X)


def test_rules_are_data():
    chosen = (Rule(parameter=".*kernel", cfg=INT8, adapter=LORA),)
    assert rules.from_json(rules.to_json(chosen)) == chosen
    assert config.from_json(config.to_json(LORA)) == LORA
    assert repr(LORA) == "Lora(rank=2, alpha=3.0)"


def test_plans_name_adapters():
    planned = adapted(matmul, INT8).plan(W, X)
    assert "LoRA of rank 2" in str(planned)
    assert '"rank": 2' in planned.to_json()


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"rank": 0, "alpha": 1}, ValueError),
        ({"rank": 2.0, "alpha": 1}, TypeError),
        ({"rank": 2, "alpha": float("nan")}, ValueError),
        ({"rank": 2, "alpha": 1, "dropout": 1.0}, ValueError),
        ({"rank": 2, "alpha": 1, "seed": -1}, ValueError),
    ],
)
def test_wrong_configs(fields, error):
    with pytest.raises(error, match=r"Lora\."):
        config.Lora(**fields)


def test_wrong_rules():
    with pytest.raises(TypeError, match=r"config\.Lora or None"):
        Rule(cfg=None, adapter={"rank": 2})
    with pytest.raises(ValueError, match="for a weight"):
        Rule(cfg=None, adapter=LORA, operands="activations")
    with pytest.raises(TypeError, match=r"Rule\.parameter must be a string"):
        Rule(cfg=None, parameter=3)


def test_an_adapter_needs_a_weight():
    rule = Rule(cfg=None, adapter=LORA)
    fn_q = aqtlite.quantize_function(matmul, [rule])
    with pytest.raises(RulesError, match="no weight for the adapter"):
        fn_q.plan(W, X)
    grouped = adapted(lambda w, x: conv(w, x, feature_group_count=4))
    with pytest.raises(ValueError, match="cannot have an adapter: it is a convolution"):
        grouped.plan(normal((3, 3, 1, 4)), normal((2, 5, 5, 4)))


def test_an_adapter_is_of_floats():
    integers = jnp.ones((8, 6), jnp.int32)
    with pytest.raises(ValueError, match="cannot have an adapter: it contracts int32"):
        adapted(matmul).plan(integers, jnp.ones((4, 8), jnp.int32))
    fn_q, empty = adapted(matmul), jnp.ones((0, 6))
    state = fn_q.init_state(empty, X[:, :0])
    assert not state and fn_q.plan(empty, X[:, :0]).replaced() == ()


@pytest.mark.parametrize("rank", [3, 20])
def test_its_first_products_have_the_spread_of_a_layer_of_any_rank(rank):
    """Also of one that does not divide the inputs of the weight, or exceeds them."""
    fn_q = adapted(matmul, lora=config.Lora(rank=rank, alpha=1))
    leaves = jax.tree.leaves(fn_q.init_state(W, X))
    (a,) = (leaf for leaf in leaves if leaf.shape == (8, rank))
    assert 0.9 < abs(a).max() * np.sqrt(8) <= 1


def test_an_adapter_needs_parameters():
    fn_q = adapted(matmul)
    with pytest.raises(TypeError, match="has a state"):
        fn_q(W, X)
    with pytest.raises(ValueError, match="has no parameters"):
        fn_q({"params": {"0": {}}}, W, X)


def test_what_cannot_be_merged():
    with pytest.raises(ValueError, match="no rule has an adapter"):
        aqtlite.merge_adapters(
            aqtlite.quantize_function(matmul, [Rule(cfg=INT8)], params=0), W, X
        )
    with pytest.raises(TypeError, match="merge_adapters takes"):
        aqtlite.merge_adapters(matmul, W, X)
    for fn in (
        lambda w, x: x @ jnp.tanh(w),
        lambda w, x: (x @ w) @ w.T,
    ):
        fn_q = adapted(fn)
        state = trained(fn_q.init_state(W, X))
        with pytest.raises(ValueError, match=re.escape("cannot be merged into")):
            aqtlite.merge_adapters(fn_q, W, X, state=state)


def lookup_and_logits(w, x):
    tokens = jnp.argmax(x, -1)
    return w[tokens] @ w.T


@pytest.mark.parametrize(
    "fn",
    [
        lookup_and_logits,
        lambda w, x: x @ w + w.sum(),
        lambda w, x: (x @ w, w),
        lambda w, x: lax.fori_loop(0, 2, lambda i, y: y + w[i].sum(), 0.0) + x @ w,
        lambda w, x: x @ w[:, :3] + w[0, 1],
    ],
)
def test_a_weight_that_something_else_reads_is_not_merged(fn):
    """A lookup of a tied embedding would be another one."""
    fn_q = adapted(fn, INT8)
    x = X[:, :6] if fn is lookup_and_logits else X
    state = trained(fn_q.init_state(W, x))
    why = "cannot be merged into 'params': something else reads it"
    with pytest.raises(ValueError, match=why):
        aqtlite.merge_adapters(fn_q, W, x, state=state)
    serving, params = aqtlite.convert_function(fn_q, W, x, state=state)
    with pytest.raises(ValueError, match=why):
        aqtlite.merge_adapters(serving, params, x)


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: (x @ w[:, :3]) @ w[:3, 3:],
        lambda w, x: jax.jit(lambda v: x @ v)(w[:, :3]) @ w[:3, 3:],
        lambda w, x: (x @ w[:, :3]) * w[:3, 3:].sum(),
        lambda w, x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, w[0, 3]) + x @ w[:, :3],
        lambda w, x: x[:, :3] + np.eye(4, 8, dtype="float32") @ w[:, :3] + w[0, 3],
    ],
)
def test_other_parts_of_a_parameter_may_be_read(fn):
    """As of layers that are stacked, of which some have adapters."""
    rules = [Rule(adapter=LORA, cfg=None, op="dot_general"), Rule(cfg=None)]
    fn_q = aqtlite.quantize_function(fn, rules, params=0)
    square = normal((8, 6), 3)
    state = trained(fn_q.init_state(square, X))
    merged = aqtlite.merge_adapters(fn_q, square, X, state=state)
    out, _ = fn_q(state, square, X)
    np.testing.assert_allclose(fn(merged, X), out, atol=1e-4)


def test_nan_in_a_weight_stays():
    w = W.at[0, 0].set(jnp.nan)
    fn_q = adapted(matmul)
    out, _ = fn_q(fn_q.init_state(w, X), w, X)
    assert jnp.isnan(out[:, 0]).all() and jnp.isfinite(out[:, 1:]).all()


def test_no_rows():
    fn_q = adapted(matmul, INT8)
    state = fn_q.init_state(W, X)
    assert fn_q(state, W, X[:0])[0].shape == (0, 6)
