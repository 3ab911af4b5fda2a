"""What the scales of activations may see, as the plan decides and says it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export, lax

import aqtlite
import aqtlite.flax.nnx
from aqtlite import Rule, config
from aqtlite.flax import AqtEinsum, quantize_model
from tests.common import nearest, normal
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

INT8 = nearest()
MOVED = "the scales of {} multiply {}"
T, HEADS, DEPTH = 6, 2, 4
Q, K, V = (normal((2, T, HEADS, DEPTH), seed) for seed in range(3))
CAUSAL = jnp.tril(jnp.ones((T, T), bool))
SCORES, VALUES = "bthd,bshd->bhts", "bhts,bshd->bthd"


def planned(function, *args, params=(), rules=INT8, **kwargs):
    return aqtlite.plan(function, *args, rules=rules, params=params, **kwargs)


def last(function, *args, **kwargs):
    """The last contraction of a function of activations."""
    return planned(function, *args, **kwargs).contractions[-1]


def giver(one):
    """The side whose scales multiply the other one; None for none."""
    moved = [s for s in ("lhs", "rhs") if getattr(one.cfg.fwd, s).scale_moves]
    assert len(moved) <= 1
    return moved[0] if moved else None


def shape_of_giver(one):
    return None if giver(one) is None else getattr(one, giver(one)).shape


def probabilities(q, k, mask=CAUSAL):
    scores = jnp.einsum(SCORES, q, k)
    return jax.nn.softmax(jnp.where(mask, scores, -1e30))


def attention(q, k, v):
    return jnp.einsum(VALUES, probabilities(q, k), v)


def swapped(q, k, v):
    return jnp.einsum("bshd,bhts->bthd", v, probabilities(q, k))


def unnormalized(q, k, v):
    """As FlashAttention sums: divided after the contraction."""
    scores = jnp.where(CAUSAL, jnp.einsum(SCORES, q, k), -jnp.inf)
    exps = jnp.exp(scores - scores.max(-1, keepdims=True))
    return jnp.einsum(VALUES, exps, v) / exps.sum(-1).swapaxes(1, 2)[..., None]


def added_mask(q, k, v):
    bias = jnp.where(CAUSAL, 0.0, -1e9)
    return jnp.einsum(VALUES, jax.nn.softmax(jnp.einsum(SCORES, q, k) + bias), v)


def without_a_mask(q, k, v):
    return jnp.einsum(VALUES, jax.nn.softmax(jnp.einsum(SCORES, q, k)), v)


def flattened_heads(q, k, v):
    q, k, v = (x.swapaxes(1, 2).reshape(-1, T, DEPTH) for x in (q, k, v))
    scores = jnp.where(CAUSAL, q @ k.swapaxes(1, 2), -1e30)
    return jax.nn.softmax(scores) @ v


def library(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def one_head_of_keys(q, k, v):
    p = jax.nn.softmax(jnp.einsum("bthd,bsd->bhts", q, k[:, :, 0]))
    return jnp.einsum("bhts,bsd->bthd", jnp.where(CAUSAL, p, 0), v[:, :, 0])


def window(q, k, v):
    near = jnp.abs(jnp.arange(T) - jnp.arange(T)[:, None]) < 3
    return jnp.einsum(VALUES, probabilities(q, k, CAUSAL & near), v)


def dropped(q, k, v):
    p = probabilities(q, k)
    keep = jax.random.bernoulli(jax.random.key(0), 0.9, p.shape)
    return jnp.einsum(VALUES, jnp.where(keep, p / 0.9, 0), v)


def rematerialized(q, k, v):
    return jax.checkpoint(attention)(q, k, v)


ATTENTIONS = [
    attention,
    swapped,
    unnormalized,
    added_mask,
    without_a_mask,
    flattened_heads,
    library,
    one_head_of_keys,
    window,
    dropped,
    rematerialized,
]


@pytest.mark.parametrize("function", ATTENTIONS)
def test_positions_of_values_have_their_own_scales(function):
    scores, values = planned(function, Q, K, V).contractions
    assert scores.is_quantized and giver(scores) is None
    assert values.is_quantized
    assert T not in shape_of_giver(values)[-1:] and DEPTH in shape_of_giver(values)


@pytest.mark.parametrize("function", [attention, swapped, library])
def test_later_values_leave_earlier_results(function):
    run = jax.jit(aqtlite.quantize_function(function, INT8))
    changed = run(Q, K.at[:, 4:].mul(30), V.at[:, 4:].mul(30))
    np.testing.assert_array_equal(run(Q, K, V)[:, :4], changed[:, :4])


def masked_attention(q, k, v, mask):
    return jnp.einsum(VALUES, probabilities(q, k, mask), v)


def injected_attention(q, k, v, mask):
    return nn.dot_product_attention(
        *(q, k, v),
        mask=mask,
        qk_attn_weights_einsum=AqtEinsum(INT8),
        attn_weights_value_einsum=AqtEinsum(INT8),
    )


@pytest.mark.parametrize(
    "function",
    [aqtlite.quantize_function(masked_attention, INT8), injected_attention],
    ids=["rules", "injected"],
)
@pytest.mark.parametrize("loud", [1, 1e3])
def test_a_sequence_of_one_is_the_first_position_of_a_longer_one(function, loud):
    first = [x[:, :1] for x in (Q, K, loud * V)]
    out = function(*first, CAUSAL[:1, :1])
    whole = function(Q, K, loud * V, CAUSAL)[:, :1]
    # The backend's floats differ by their last bits between programs.
    np.testing.assert_allclose(out, whole, rtol=1e-6)
    assert (out != first[2]).any()


def test_the_roles_of_one_array_are_known():
    """Queries, keys and values that are one input, in a batch."""
    _, values = planned(lambda x: attention(x, x, x), Q).contractions
    assert shape_of_giver(values) == (2, T, HEADS, DEPTH)


def test_masks_without_a_softmax():
    """Of linear attention and state spaces: decay, and zeros."""

    def retention(w, x):
        q, k, v = (x @ one for one in w)
        decay = jnp.where(CAUSAL, 0.9 ** jnp.abs(jnp.arange(T)[:, None]), 0)
        return (jnp.einsum("btd,bsd->bts", q, k) * decay) @ v

    w = normal((3, 8, 4))
    scores, values = planned(retention, w, normal((2, T, 8)), params=0).contractions[3:]
    assert giver(scores) is None
    assert shape_of_giver(values) == (2, T, 4)


def test_states_of_chunks_see_all_of_their_chunk():
    """``k^T v`` sums all positions, which every result may see."""
    one = last(lambda k, v: jnp.einsum("bshd,bshe->bhde", k, v), K, V)
    assert one.is_quantized and giver(one) is None


def test_padding_is_masked_in_keys():
    def state(k, v, mask):
        k = jnp.where(mask[..., None, None], k, 0)
        return jnp.einsum("bshd,bshe->bhde", k, v)

    mask = jnp.arange(T) < jnp.array([[4], [6]])
    # Features that are inputs could be positions.
    one = last(state, K, V, mask)
    assert not one.is_quantized and "masked" in one.why_float

    def projected(w, x, mask):
        return state((x @ w).reshape(K.shape), (x @ w).reshape(K.shape), mask)

    w, x = normal((8, HEADS * DEPTH)), normal((2, T, 8))
    one = last(projected, w, x, mask, params=0)
    assert one.is_quantized and giver(one) is not None


def test_experts():
    def experts(w, x):
        gates = jax.nn.softmax(x @ w["router"])
        chosen = jax.nn.one_hot(gates.argmax(-1), 3)
        place = jnp.cumsum(chosen, 1) * chosen
        dispatch = jax.nn.one_hot(place - 1, 2) * chosen[..., None]
        rows = jnp.einsum("gsec,gsm->egcm", dispatch, x @ w["in"])
        rows = jnp.einsum("egcm,emh->egch", rows, w["experts"])
        combine = dispatch * gates[..., None]
        return jnp.einsum("gsec,egch->gsh", combine, rows)

    w = {
        "router": normal((4, 3)),
        "in": normal((4, 4)),
        "experts": normal((3, 4, 5)),
    }
    x = normal((2, T, 4))
    plan = planned(experts, w, x, params=0)
    dispatch, _, combine = plan.contractions[2:]
    assert shape_of_giver(dispatch) == (2, T, 4)
    assert 5 in shape_of_giver(combine)
    run = jax.jit(aqtlite.quantize_function(experts, INT8, params=0))
    other = run(w, x.at[1].mul(20))
    np.testing.assert_array_equal(run(w, x)[0], other[0])


def test_dropped_queries_contract_features():
    def scores(w, x):
        q, k = x @ w, x @ w
        keep = jax.random.bernoulli(jax.random.key(0), 0.5, q.shape)
        return jnp.where(keep, q, 0) @ k.T

    one = last(scores, normal((8, 4)), normal((T, 8)), params=0)
    assert one.is_quantized and giver(one) is None


def test_mixing_of_positions_by_a_masked_weight_stays_in_float():
    def mixer(w, x):
        return jnp.einsum("ts,bsd->btd", jnp.where(CAUSAL, w, 0), x)

    one = last(mixer, normal((T, T)), normal((2, T, 4)), params=0)
    assert "masked along the axes that are contracted" in one.why_float
    dense = last(lambda w, x: jnp.einsum("ts,bsd->btd", w, x), CAUSAL * 1.0, Q[:, :, 0])
    assert dense.is_quantized
    static = config.static_int8()
    one = last(mixer, normal((T, T)), normal((2, T, 4)), params=0, rules=static)
    assert one.is_quantized


def test_products_of_two_causal_matrices_stay_in_float():
    def twice(x):
        p = jax.nn.softmax(jnp.where(CAUSAL, x @ x.T, -1e30))
        return p @ p

    one = last(twice, normal((T, 4)))
    assert not one.is_quantized
    with pytest.raises(ValueError, match="strict=True, and 1 contractions stay"):
        aqtlite.quantize_function(twice, INT8, strict=True)(normal((T, 4)))


# --- Activations and weights ------------------------------------------------------


@pytest.mark.parametrize("preset", [config.weight_only(4), config.lsq_weight_only(4)])
def test_weight_only_quantizes_weights_only(preset, caplog):
    model = nn.MultiHeadDotProductAttention(2)
    x = normal((1, T, 8))
    variables = init(model, x)
    quantized = quantize_model(model, preset, strict=True)
    plan = quantized.plan(variables, x)
    assert len(plan.quantized()) == 4
    assert all(one.reads_weight for one in plan.quantized())
    for one in plan.left_float():
        assert "quantizes weights alone" in one.why_float
    assert "stays in float" not in caplog.text


def test_two_activations_take_the_config_of_activations():
    cfg = config.update(config.w4a8(), {"fwd.rhs.blocks": config.Blocks(size=4)})
    scores, values = planned(attention, Q, K, V, rules=cfg).contractions
    assert scores.cfg.fwd.lhs == scores.cfg.fwd.rhs == cfg.fwd.lhs
    assert {values.cfg.fwd.lhs.grid.bits, values.cfg.fwd.rhs.grid.bits} == {8}


@pytest.mark.parametrize("preset", [config.mxfp8(), config.nvfp4(), config.block_fp8()])
def test_blocks_lie_along_features(preset):
    scores, values = planned(attention, Q, K, V, rules=preset).contractions
    assert scores.cfg.fwd.lhs.blocks.remaining_size == 1
    assert scores.cfg.fwd.rhs.blocks.remaining_size == 1
    assert values.cfg.fwd.lhs.blocks is None and values.cfg.fwd.rhs.blocks is None


def test_static_ranges_see_nothing():
    cfg = config.static_int8()
    for one in planned(attention, Q, K, V, rules=cfg).contractions:
        assert one.cfg.fwd.lhs == one.cfg.fwd.rhs == cfg.fwd.lhs


def test_the_plan_says_what_positions_share():
    shared = {"fwd.lhs.calib_shared_axes": "per_tensor"}
    cfg = config.update(INT8, shared)
    plan = planned(lambda w, x: x @ w, normal((4, 4)), Q, params=0, rules=cfg)
    assert plan.contractions[0].shared_by("lhs") == "positions and examples"
    assert "positions and examples share the scale of lhs" in str(plan)
    cfg = config.update(INT8, {"fwd.smoothing": config.Smoothing()})
    plan = planned(lambda w, x: x @ w, normal((4, 4)), Q, params=0, rules=cfg)
    assert plan.contractions[0].shared_by("lhs") == "positions and examples"
    plan = planned(attention, Q, K, V)
    assert [one.shared_by("lhs") for one in plan.contractions] == [None, None]
    assert "the scales of rhs multiply lhs" in str(plan) or (
        "the scales of lhs multiply rhs" in str(plan)
    )


# --- Convolutions -----------------------------------------------------------------

KERNEL = normal((3, 4, 4))
TIME = normal((2, 8, 4))


def conv(x, w, padding, **kwargs):
    numbers = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(
        x, w, (1,), padding, dimension_numbers=numbers, **kwargs
    )


def padded_by_hand(w, x):
    return conv(jnp.pad(x, ((0, 0), (2, 0), (0, 0))), w, "VALID")


def continued(w, x):
    """The last inputs of a chunk before, then those of this one."""
    return conv(jnp.concatenate([jnp.zeros((2, 2, 4)), x], 1), w, "VALID")


OVER_TIME = {
    "padding": lambda w, x: conv(x, w, [(2, 0)]),
    "dilated": lambda w, x: conv(x, w, [(4, 0)], rhs_dilation=(2,)),
    "by hand": padded_by_hand,
    "by hand, after an activation": lambda w, x: padded_by_hand(w, jnp.tanh(x)),
    "padded, then an activation": lambda w, x: conv(
        nn.gelu(jnp.pad(x, ((0, 0), (2, 0), (0, 0)))), w, "VALID"
    ),
    "continued": continued,
    "a step of decoding": lambda w, x: continued(w, jnp.tanh(x[:, :1])),
    "a step after kept inputs": lambda w, x: conv(
        jnp.concatenate([x[:, :2], jnp.tanh(x[:, :1])], 1), w, "VALID"
    ),
    "depthwise": lambda w, x: conv(x, w[:, :1], [(2, 0)], feature_group_count=4),
}


@pytest.mark.parametrize("function", OVER_TIME.values(), ids=OVER_TIME)
def test_convolutions_over_time_stay_in_float(function):
    one = last(function, KERNEL, TIME, params=0)
    assert "a convolution over time" in one.why_float
    static = last(function, KERNEL, TIME, params=0, rules=config.static_int8())
    weights = last(function, KERNEL, TIME, params=0, rules=config.weight_only())
    assert static.is_quantized and weights.is_quantized
    # Digits of the input would share a scale.
    assert weights.cfg.fwd.rhs.use_fake_quant


@pytest.mark.parametrize("padding", ["SAME", "VALID", [(1, 1)]])
def test_convolutions_that_look_both_ways_are_quantized(padding):
    one = last(lambda w, x: conv(x, w, padding), KERNEL, TIME, params=0)
    assert one.is_quantized and one.shared_by("lhs") == "positions"


def test_layers_are_told_by_their_padding():
    for padding, count in (("CAUSAL", 1), ("SAME", 0)):
        model = nn.Sequential([nn.Conv(4, (3,), padding=padding), nn.Dense(4)])
        variables = init(model, TIME)
        plan = quantize_model(model, INT8).plan(variables, TIME)
        assert len(plan.left_float()) == count
        of_nnx = nnx.Conv(4, 4, (3,), padding=padding, rngs=nnx.Rngs(0))
        quantized = aqtlite.flax.nnx.quantize_model(of_nnx, [Rule(cfg=INT8)])
        plan = aqtlite.flax.nnx.plan(quantized, TIME)
        assert len(plan.left_float()) == count


POINTWISE = [
    ("NWC", "WIO", "NWC"),
    ("NCHW", "OIHW", "NHWC"),
    ("CNHW", "HIWO", "CHNW"),
]


@pytest.mark.code("users")
@pytest.mark.parametrize("numbers", POINTWISE, ids="-".join)
def test_pointwise_convolutions_are_matrix_products(numbers):
    sizes = {"N": 2, "C": 5, "H": 3, "W": 4}
    x = normal([sizes[letter] for letter in numbers[0]])
    w = normal([{"I": 5, "O": 3}.get(letter, 1) for letter in numbers[1]], 1)
    ones = (1,) * (x.ndim - 2)

    def function(w, x):
        return lax.conv_general_dilated(x, w, ones, "SAME", dimension_numbers=numbers)

    quantized = aqtlite.quantize_function(function, INT8, params=0)
    run = jax.jit(quantized)
    found, wanted = run(w, x), function(w, x)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, atol=0.03 * np.abs(wanted).max())
    gradients, floats = (
        jax.grad(lambda w, x, f=f: (f(w, x) ** 2).sum(), (0, 1))(w, x)
        for f in (run, function)
    )
    for one, other in zip(gradients, floats, strict=True):
        np.testing.assert_allclose(one, other, atol=0.05 * np.abs(other).max())
    serve, serving = aqtlite.convert_function(quantized, w, x)
    np.testing.assert_array_equal(jax.jit(serve)(serving, x), found)
    axis = numbers[0].index("W")
    loud = jnp.where(lax.broadcasted_iota(int, x.shape, axis) < 2, x, 30 * x)
    kept = (range(2), numbers[2].index("W"))
    first, second = (np.take(run(w, one), *kept) for one in (x, loud))
    np.testing.assert_array_equal(first, second)


def test_symbolic_sizes_keep_the_roles():
    def heads(w, x):
        q = (x @ w).reshape(*x.shape[:2], HEADS, -1)
        mask = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))
        values = jnp.concatenate([q[:, :1], q[:, 1:]], 1)
        return jnp.einsum(VALUES, probabilities(q, q, mask), values)

    quantized = aqtlite.quantize_function(heads, INT8, params=0)
    batch, length = export.symbolic_shape("b, t")
    w, x = normal((8, 8)), normal((2, T, 8))
    symbolic = jax.ShapeDtypeStruct((batch, length, 8), jnp.float32)
    exported = export.export(jax.jit(quantized))(w, symbolic)
    assert str(exported.mlir_module()).count("xi8>") > 4
    error = jnp.abs(exported.call(w, x) - jax.jit(quantized)(w, x)).max()
    assert error < 1e-6


def test_experts_of_tokens_that_are_inputs():
    """Tokens without a projection before, some of which are set to zero."""

    def dispatched(x, lengths):
        x = jnp.where((jnp.arange(T) < lengths[:, None])[..., None], x, 0)
        slot = jnp.cumsum(jnp.ones((2, T), int), 1) - 1
        return jnp.einsum("bsc,bsd->bcd", jax.nn.one_hot(slot, T), x)

    def chosen(x, lengths):
        keep = (jnp.arange(3) < lengths[:, None])[:, None]
        near = jnp.arange(T)[:, None] // 2 == jnp.arange(3)
        return jnp.einsum("bsc,bsd->bcd", jnp.where(keep & near, 0.5, 0), x)

    one = last(chosen, normal((2, T, 4)), jnp.array([2, 3]))
    assert shape_of_giver(one) == (2, T, 4)
    assert (
        "only moved" in last(dispatched, normal((2, T, 4)), jnp.array([2, 3])).why_float
    )


def test_choices_of_several_experts():
    """Dispatch and combination by sums of products of one-hot arrays."""

    def experts(w, x):
        gates, chosen = lax.top_k(jax.nn.softmax(x @ w["router"]), 2)
        expert = jax.nn.one_hot(chosen, 3)
        slot = jax.nn.one_hot(jnp.cumsum(chosen, 1) % 2, 2)
        dispatch = jnp.einsum("btke,btkc->btec", expert, slot)
        rows = jnp.einsum("btec,btd->ebcd", dispatch, x)
        combine = jnp.einsum("btk,btke,btkc->btec", gates, expert, slot)
        return jnp.einsum("btec,ebcd->btd", combine, rows)

    w, x = {"router": normal((4, 3))}, normal((2, T, 4))
    plan = planned(experts, w, x, params=0)
    dispatch, combine = (
        one for one in plan.contractions if one.path.endswith(("->ebcd", "->btd"))
    )
    assert shape_of_giver(dispatch) == (2, T, 4)
    assert shape_of_giver(combine)[-1] == 4


def test_products_of_products_of_causal_matrices_stay_in_float():
    """As of the inverse in a delta rule."""

    def doubled(x):
        a = jnp.where(CAUSAL, x @ x.T, 0)
        return (a @ a) @ (a @ a)

    *_, square, fourth = planned(doubled, normal((T, 4))).contractions
    assert not square.is_quantized and not fourth.is_quantized


@pytest.mark.parametrize("padding", [[(2, 2)], "SAME"])
def test_convolutions_that_are_cut_or_masked_over_time(padding):
    def function(w, x):
        kernel = w if padding != "SAME" else w * jnp.array([1.0, 1, 0])[:, None, None]
        return conv(x, kernel, padding)[:, : x.shape[1]]

    assert "over time" in last(function, KERNEL, TIME, params=0).why_float


def test_constant_kernels_have_zeros_of_their_own():
    sobel = jnp.array([1.0, 0, -1])[:, None, None] * jnp.ones((3, 4, 1))
    assert last(lambda x: conv(x, sobel, "SAME"), TIME).is_quantized


def test_transposed_convolutions_are_quantized():
    def function(w, x):
        return lax.conv_transpose(
            x, w, (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )

    assert last(function, KERNEL, TIME, params=0).is_quantized
