"""The contraction that a failed check of causality or independence names."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import aqtlite
from aqtlite import config
from aqtlite.flax import AqtDotGeneral, quantize_model
from aqtlite.flax import nnx as aqt_nnx
from aqtlite.testing import assert_causal, assert_independent
from tests.common import normal
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

INT8 = config.fully_quantized()
PER_TENSOR = config.update(INT8, {"fwd.lhs.calib_shared_axes": "per_tensor"})
QUANTIZED_EINSUM = functools.partial(
    jnp.einsum, _dot_general=aqtlite.make_dot_general(INT8)
)
X = normal((2, 6, 8))


class Attention(nn.Module):
    """Attention with a mask, or without, and an einsum for its values."""

    is_masked: bool = True
    einsum: object = jnp.einsum

    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(x[..., 0]) if self.is_masked else None
        return nn.MultiHeadDotProductAttention(
            2,
            qk_attn_weights_einsum_cls=lambda: jnp.einsum,
            attn_weights_value_einsum_cls=lambda: self.einsum,
            name="attention",
        )(x, mask=mask)


class Block(nn.Module):
    is_masked: bool = True
    einsum: object = jnp.einsum

    @nn.compact
    def __call__(self, x):
        x = x + Attention(self.is_masked, self.einsum)(nn.LayerNorm()(x))
        return x + nn.Dense(8)(nn.relu(nn.Dense(16)(x)))


class Decoder(nn.Module):
    """Two blocks, of which the second is different."""

    second: Block

    def setup(self):
        self.first = Block()

    def __call__(self, x):
        return self.second(self.first(x))


class Layers(nn.Module):
    """Three dense layers, of which the second may quantize per tensor."""

    second: object = None

    @nn.compact
    def __call__(self, x):
        for i in range(3):
            dot_general = self.second if i == 1 else None
            x = nn.relu(nn.Dense(8, dot_general=dot_general, name=f"layer_{i}")(x))
        return x


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x))
        return nn.Dense(4)(x)


class Convolution(nn.Module):
    padding: str = "CAUSAL"
    cfg: config.DotGeneral | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8)(x)
        if self.padding == "VALID":
            x = jnp.pad(x, [(0, 0), (2, 0), (0, 0)])
        convolve = None
        if self.cfg is not None:
            convolve = aqtlite.make_conv_general_dilated(self.cfg)
        return nn.Conv(8, (3,), padding=self.padding, conv_general_dilated=convolve)(x)


class Scanned(nn.Module):
    """A stack of blocks in a scan, whose layers have no name of their own."""

    einsum: object = jnp.einsum

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            lambda block, x, _: (block(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        return scan(Block(einsum=self.einsum, name="block"), x, None)[0]


def named(check, model, x=X, **kwargs) -> str:
    """What the failed check of a model says of the first contraction."""
    apply = functools.partial(model.apply, init(model, x), **kwargs)
    with pytest.raises(AssertionError) as raised:
        check(apply, x)
    return str(raised.value).partition(" after. ")[2]


def test_the_scale_of_the_values_of_attention():
    found = named(assert_causal, Decoder(Block(einsum=QUANTIZED_EINSUM)))
    assert found == (
        "The first contraction whose operands or scales change there is "
        "'Decoder/second/Attention_0/attention/...hqk,...khd->...qhd' (quantized): "
        "positions share the scales of its lhs (int8[2,6,2,4], scales "
        "float32[2,1,2,4])"
    )


def test_a_forgotten_mask():
    found = named(assert_causal, Decoder(Block(is_masked=False)))
    assert found.startswith(
        "The first contraction that mixes positions is "
        "'Decoder/second/Attention_0/attention/...qhd,...khd->...hqk' ("
    )


@pytest.mark.parametrize(
    ("check", "noun"), [(assert_causal, "positions"), (assert_independent, "examples")]
)
def test_a_scale_per_tensor(check, noun):
    found = named(check, Layers(AqtDotGeneral(PER_TENSOR)))
    assert found == (
        "The first contraction whose operands or scales change there is "
        f"'Layers/layer_1' (quantized): {noun} share the scales of its "
        "lhs (int8[2,6,8], scales float32[1,1,1])"
    )


def test_rules_name_paths_as_plans_do():
    rules = [
        aqtlite.Rule(path="Layers/layer_1", cfg=PER_TENSOR),
        aqtlite.Rule(cfg=INT8),
    ]
    model = quantize_model(Layers(), rules)
    found = named(assert_causal, model)
    plan = model.plan(init(model, X), X)
    assert f"{plan.contractions[1].path!r} (quantized)" in found


@pytest.mark.parametrize("padding", ["CAUSAL", "VALID"])
def test_a_convolution_over_time(padding):
    found = named(assert_causal, Convolution(padding, INT8))
    assert "is 'Convolution/Conv_0' (quantized): positions share" in found
    assert "its lhs (int8[2,8,8], scales float32[2,1,1])" in found


def test_a_float_convolution_that_looks_ahead():
    found = named(assert_causal, Convolution("SAME"))
    assert "mixes positions is 'Convolution/Conv_0' (conv_general_dilated)" in found


def test_batch_normalization():
    x = X[:, 0]
    found = named(assert_independent, Normalized(), x, mutable=["batch_stats"])
    assert found == (
        "The changes get there in reduce_sum of float32[2,8] at "
        "'Normalized/BatchNorm_0'. The first contraction whose operands change there "
        "is 'Normalized/Dense_1' (ab,bc->ac), lhs float32[2,8]"
    )


def test_a_stack_in_a_scan():
    found = named(assert_causal, Scanned(QUANTIZED_EINSUM))
    assert "/block/Attention_0/attention/...hqk,...khd->...qhd' (quantized)" in found
    assert ", step 0 of a loop: positions share the scales of its lhs" in found


def test_the_step_of_a_scan():
    def fn(x):
        w = jnp.stack([jnp.eye(8), jnp.full((8, 8), 0.1), jnp.eye(8)])
        mixes = jnp.array([0.0, 1.0, 0.0])

        def step(x, layer):
            w, mixes = layer
            return (x + mixes * x.mean(1, keepdims=True)) @ w, None

        return jax.lax.scan(step, x, (w, mixes))[0]

    with pytest.raises(AssertionError, match="reduce_sum .*, step 1 of a loop"):
        assert_causal(fn, X)


def test_loops_over_time():
    w = normal((8, 8), 1)

    def forward(x, reverse=False):
        def step(h, x):
            h = jnp.tanh(x + h @ w)
            return h, h

        time_first = jnp.swapaxes(x, 0, 1)
        h = jnp.zeros_like(time_first[0])
        return jnp.swapaxes(jax.lax.scan(step, h, time_first, reverse=reverse)[1], 0, 1)

    def both(x):
        with jax.named_scope("forward"):
            y = forward(x)
        with jax.named_scope("backward"):
            return forward(y, reverse=True)

    assert_causal(forward, X)
    with pytest.raises(AssertionError, match=r"'backward' \(ab,bc->ac\), step 2 of"):
        assert_causal(both, X)


def test_branches_and_while_loops():
    w = normal((8, 8), 1)

    def mixed(x):
        with jax.named_scope("mixing"):
            return jnp.einsum("btd,ts->bsd", x, jnp.ones((6, 6)))

    def in_branch(x):
        return jax.lax.cond(w[0, 0] > -9, mixed, jnp.sin, x @ w)

    def in_loop(x):
        return jax.lax.while_loop(
            lambda carry: carry[0] < w[0, 0] + 3,
            lambda carry: (carry[0] + 1, mixed(carry[1] @ w)),
            (0.0, x),
        )[1]

    for fn, where in ((in_branch, ""), (in_loop, ", step 0 of a loop")):
        with pytest.raises(AssertionError) as raised:
            assert_causal(fn, X)
        assert f"is 'mixing/btd,ts->bsd' (ab,cad->bcd){where}" in str(raised.value)


def test_a_branch_that_the_values_choose():
    def fn(x):
        return jax.lax.cond(jnp.abs(x).max() > 5, jnp.sin, jnp.cos, x)

    with pytest.raises(AssertionError, match="get there in reduce_max of float32"):
        assert_causal(fn, X)


def test_checkpoints_and_custom_gradients_are_entered():
    @jax.custom_vjp
    def mixed(x):
        return x.at[:, 0].add(x[:, -1])

    mixed.defvjp(lambda x: (mixed(x), None), lambda _, g: (g,))

    @jax.checkpoint
    def fn(x):
        with jax.named_scope("inside"):
            return jax.jit(mixed)(x) @ jnp.eye(8)

    with pytest.raises(AssertionError, match="at 'inside'. The first contraction"):
        assert_causal(fn, X)


def test_a_gradient():
    def loss(x):
        return jnp.sum(jnp.cumsum(x**2, 1) ** 2)

    with pytest.raises(AssertionError, match="get there in"):
        assert_causal(jax.grad(loss), X)


def test_other_layouts_of_positions():
    """Merged with examples, cut into chunks, and scanned in chunks."""
    w = np.eye(8, dtype=np.float32)

    def merged(x):
        return (x.reshape(-1, 8) @ w).reshape(x.shape)

    def chunked(x):
        chunks = x.reshape(2, 3, 2, 8) @ w
        within = jnp.cumsum(chunks, 2)
        before = jnp.cumsum(within[:, :-1, -1:], 1)
        return within.at[:, 1:].add(before).reshape(x.shape)

    def scanned(x):
        def step(total, chunk):
            sums = total + jnp.cumsum(chunk @ w, 1)
            return sums[:, -1:], sums

        chunks = jnp.moveaxis(x.reshape(2, 3, 2, 8), 1, 0)
        sums = jax.lax.scan(step, jnp.zeros((2, 1, 8)), chunks)[1]
        return jnp.moveaxis(sums, 0, 1).reshape(x.shape)

    def leaking(x):
        with jax.named_scope("leak"):
            return x @ w + jnp.max(x, 1, keepdims=True)

    for fn in (merged, chunked, scanned):
        assert_causal(fn, X)
        with pytest.raises(AssertionError, match="reduce_max of .* at 'leak'"):
            assert_causal(lambda x, fn=fn: fn(leaking(fn(x))), X)


class Nnx(nnx.Module):
    """Modules without name scopes."""

    def __init__(self, rngs):
        self.up = nnx.Linear(8, 12, rngs=rngs)
        self.inner = nnx.List([nnx.Linear(12, 12, rngs=rngs) for _ in range(2)])
        self.down = nnx.Linear(12, 8, rngs=rngs)

    def __call__(self, x):
        x = self.up(x)
        for layer in self.inner:
            x = nnx.relu(layer(x))
        return self.down(x)


@pytest.mark.parametrize("path", ["up", "inner/1", "down"])
def test_modules_of_nnx_have_the_paths_of_their_plan(path):
    model = Nnx(nnx.Rngs(0))
    assert_causal(model, X)
    rules = [
        aqtlite.Rule(path=path, cfg=PER_TENSOR),
        aqtlite.Rule(cfg=INT8),
    ]
    quantized = aqt_nnx.quantize_model(model, rules)
    with pytest.raises(AssertionError, match=f"is '{path}' \\(quantized\\): positions"):
        assert_causal(quantized, X)


def test_contractions_without_a_scope():
    dot_general = aqtlite.make_dot_general(PER_TENSOR)

    def fn(x):
        w, last = jnp.eye(8), (((2,), (0,)), ((), ()))
        return dot_general(x @ w, w, last) @ w

    with pytest.raises(AssertionError, match=r"is '#1' \(quantized\)"):
        assert_causal(fn, X)
