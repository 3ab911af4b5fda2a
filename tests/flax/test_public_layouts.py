"""Layouts of public Linen models, quantized by rules without a change.

docs/models_tried.md has the models themselves. Here are their ways to contract, each in
a few lines: a kernel that a module transposes, `einsum`s of parameters, tied
embeddings, methods that call methods, logical partitioning in a scan of rematerialized
layers, recurrent cells, and convolutions with batch statistics.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite import Rule, config
from aqtlite.flax import convert, quantize_model
from tests.common import relative_error
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

INT8 = config.fully_quantized()
TOKENS = jnp.arange(8).reshape(2, 4)


class Gpt2(nn.Module):
    """Hugging Face's: `Conv1D` stores (out, in), and a head shares the embedding."""

    @nn.compact
    def __call__(self, tokens):
        embedding = nn.Embed(16, 8, name="wte")
        x = embedding(tokens)
        x = x + Conv1D(8, name="c_proj")(nn.gelu(Conv1D(16, name="c_fc")(x)))
        kernel = embedding.variables["params"]["embedding"].T
        head = nn.Dense(16, use_bias=False, name="lm_head")
        return head.apply({"params": {"kernel": kernel}}, x)


class Conv1D(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x):
        shape = self.features, x.shape[-1]
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        contracted = ((x.ndim - 1,), (0,)), ((), ())
        return jax.lax.dot_general(x, kernel.transpose(), contracted)


class Gemma(nn.Module):
    """Google DeepMind's: stacked projections in `einsum`s, a gate that is sliced."""

    @nn.compact
    def __call__(self, tokens):
        embedder = Embedder(name="embedder")
        x = embedder.encode(tokens)
        init = nn.initializers.lecun_normal()
        with jax.named_scope("attn"):
            qkv = self.param("qkv", init, (3, 2, 8, 4))
            q, k, v = jnp.einsum("BTD,SNDH->SBTNH", x, qkv)
            weights = nn.softmax(jnp.einsum("BTNH,BSNH->BTNS", q, k))
            heads = jnp.einsum("BTNS,BSNH->BTNH", weights, v)
            x += jnp.einsum("BTNH,NHD->BTD", heads, self.param("o", init, (2, 4, 8)))
        with jax.named_scope("mlp"):
            gate = self.param("gating_einsum", init, (2, 8, 16))
            hidden = nn.gelu(jnp.dot(x, gate[0])) * jnp.dot(x, gate[1])
            x += jnp.dot(hidden, self.param("linear", init, (16, 8)))
        return embedder.decode(x)


class Embedder(nn.Module):
    def setup(self):
        self.table = self.param("table", nn.initializers.normal(), (16, 8))

    def encode(self, tokens):
        return self.table[tokens] * jnp.sqrt(8.0)

    def decode(self, x):
        return jnp.dot(x, self.table.T)


class MaxText(nn.Module):
    """A decoder in `nn.scan` over `nn.remat`, its parameters with logical axes."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(16, 8, name="token_embedder")(tokens)
        layer = nn.remat(
            DecoderLayer,
            prevent_cse=False,
            policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        )
        layers = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = layers(name="layers")(x, None)
        return DenseGeneral((16,), name="logits_dense")(x)


class DecoderLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        q, k = (DenseGeneral((2, 4), name=name)(x) for name in ("query", "key"))
        weights = nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
        x = x + DenseGeneral((8,), (-2, -1), name="out")(
            jnp.einsum("bnts,bsnh->btnh", weights, k)
        )
        return x, None


class DenseGeneral(nn.Module):
    features: tuple[int, ...]
    axis: tuple[int, ...] = (-1,)

    @nn.compact
    def __call__(self, x):
        axes = tuple(a % x.ndim for a in self.axis)
        shape = *(x.shape[a] for a in axes), *self.features
        names = ("embed", "heads", "kv")[: len(shape)]
        init = nn.with_logical_partitioning(nn.initializers.normal(0.3), names)
        kernel = jnp.asarray(self.param("kernel", init, shape), x.dtype)
        return jax.lax.dot_general(
            x, kernel, ((axes, tuple(range(len(axes)))), ((), ()))
        )


class Seq2seq(nn.Module):
    """Flax's: a recurrent encoder, and a decoder that starts from its carry."""

    @nn.compact
    def __call__(self, tokens):
        x = jax.nn.one_hot(tokens, 16)
        carry, _ = nn.RNN(nn.LSTMCell(8), return_carry=True, name="encoder")(x)
        y = nn.RNN(nn.LSTMCell(8), name="decoder")(x, initial_carry=carry)
        return nn.Dense(16)(y)


class ResNet(nn.Module):
    """Flax's: strided convolutions and projections, with batch statistics."""

    @nn.compact
    def __call__(self, tokens, train=False):
        x = jax.nn.one_hot(tokens, 16).reshape(2, 4, 4, 4)
        conv = functools.partial(nn.Conv, use_bias=False)
        norm = functools.partial(nn.BatchNorm, use_running_average=not train)
        y = nn.relu(norm()(conv(4, (3, 3), (2, 2))(x)))
        y = norm()(conv(8, (1, 1))(y))
        residual = norm(name="norm_proj")(conv(8, (1, 1), (2, 2), name="conv_proj")(x))
        return nn.Dense(4)(nn.relu(residual + y).mean((1, 2)))


class Wmt(nn.Module):
    """Flax's, and lm1b's decoder: one embedding for both inputs and for the logits."""

    is_decoding: bool = False

    @nn.compact
    def __call__(self, tokens):
        shared = nn.Embed(16, 8, name="shared_embedding")
        attention = functools.partial(
            nn.MultiHeadDotProductAttention, num_heads=2, use_bias=False
        )
        encoded = nn.relu(nn.Dense(8, name="encoder")(shared(tokens)))
        x = nn.LayerNorm()(shared(tokens))
        mask = None if self.is_decoding else nn.make_causal_mask(tokens)
        x += attention(decode=self.is_decoding)(x, mask=mask)
        x += attention(name="encoder_decoder")(x, encoded)
        return shared.attend(x) / jnp.sqrt(8.0)


class Vae(nn.Module):
    """Flax's: modules made in `setup`, and noise from an rng of the call."""

    def setup(self):
        self.hidden, self.out = nn.Dense(8), nn.Dense(16)
        self.mean, self.logvar, self.up = nn.Dense(4), nn.Dense(4), nn.Dense(8)

    def __call__(self, tokens):
        h = nn.relu(self.hidden(jax.nn.one_hot(tokens, 16)))
        mean, logvar = self.mean(h), self.logvar(h)
        noise = jax.random.normal(jax.random.key(1), mean.shape)
        return self.generate(mean + jnp.exp(0.5 * logvar) * noise)

    def generate(self, z):
        return self.out(nn.relu(self.up(z)))


class Bert(nn.Module):
    """Hugging Face's: a pooler of one token, and a head that shares the embedding."""

    @nn.compact
    def __call__(self, tokens):
        words = nn.Embed(16, 8, name="word_embeddings")
        x = nn.LayerNorm()(words(tokens) + nn.Embed(4, 8)(jnp.arange(4)))
        q, k, v = (
            nn.Dense(8, name=name)(x).reshape(2, 4, 2, 4)
            for name in ("query", "key", "value")
        )
        heads = nn.dot_product_attention(q, k, v).reshape(2, 4, 8)
        x = nn.LayerNorm()(nn.Dense(8, name="output")(heads) + x)
        pooled = nn.tanh(nn.Dense(8, name="pooler")(x[:, 0]))
        x = nn.LayerNorm()(nn.gelu(nn.Dense(8, name="transform")(x)))
        kernel = words.variables["params"]["embedding"].T
        decoder = nn.Dense(16, use_bias=False, name="decoder")
        bias = self.param("bias", nn.initializers.zeros, (16,))
        logits = decoder.apply({"params": {"kernel": kernel}}, x) + bias
        return jnp.concatenate([logits.reshape(2, -1), pooled], axis=1)


class T5(nn.Module):
    """Hugging Face's: scale-only norms, relative positions, a gate, a scaled head."""

    @nn.compact
    def __call__(self, tokens):
        shared = nn.Embed(16, 8, name="shared")
        dense = functools.partial(nn.Dense, use_bias=False)
        norm = functools.partial(nn.RMSNorm, epsilon=1e-6)
        x = shared(tokens)
        h = norm()(x)
        q, k, v = (dense(8, name=name)(h).reshape(2, 4, 2, 4) for name in "qkv")
        distance = jnp.clip(jnp.arange(4) - jnp.arange(4)[:, None], -2, 2) + 2
        bias = nn.Embed(5, 2, name="relative_attention_bias")(distance)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias.transpose(2, 0, 1)
        heads = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), v)
        x += dense(8, name="o")(heads.reshape(2, 4, 8))
        h = norm()(x)
        x += dense(8, name="wo")(nn.gelu(dense(16, name="wi_0")(h)) * dense(16)(h))
        return shared.attend(norm()(x) * 8**-0.5)


@pytest.mark.parametrize(
    ("model", "num_weights", "num_of_activations"),
    [
        (Gpt2(), 3, 0),
        pytest.param(Gemma(), 6, 2, marks=pytest.mark.slow),
        pytest.param(MaxText(), 4, 2, marks=pytest.mark.slow),
        pytest.param(Seq2seq(), 17, 0, marks=pytest.mark.slow),
        (ResNet(), 4, 0),
        pytest.param(Wmt(), 10, 4, marks=pytest.mark.slow),
        # Its first layer looks up one-hot tokens.
        pytest.param(Vae(), 4, 0, marks=pytest.mark.slow),
        pytest.param(Bert(), 7, 2, marks=pytest.mark.slow),
        pytest.param(T5(), 8, 2, marks=pytest.mark.slow),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else "",
)
def test_every_contraction_is_quantized_and_served(
    model, num_weights, num_of_activations
):
    rules = [
        Rule(operands="weight", cfg=INT8),
        Rule(operands="activations", cfg=INT8, is_required=bool(num_of_activations)),
    ]
    quantized = quantize_model(model, rules, strict=True)
    variables = init(model, TOKENS)
    planned = quantized.plan(variables, TOKENS).quantized()
    assert [one.rule for one in planned].count(0) == num_weights
    assert [one.rule for one in planned].count(1) == num_of_activations
    serving = convert(quantized, variables, TOKENS, strict=True)

    @jax.jit
    def run(variables, serving):
        outputs = (quantized.apply(one, TOKENS) for one in (variables, serving))
        return *outputs, model.apply(variables, TOKENS)

    out, served, in_float = run(variables, serving)
    np.testing.assert_array_equal(served, out)
    assert 0 < relative_error(out, in_float) < 0.1


def test_a_decoder_with_a_cache_serves_what_the_whole_sequence_froze():
    trained, decoder = (quantize_model(Wmt(one), INT8) for one in (False, True))
    variables = init(decoder, TOKENS)
    cache = variables.pop("cache")
    serving = convert(trained, variables, TOKENS)

    @jax.jit
    def both_decode(variables, serving):
        def step(caches, token):
            steps = [
                decoder.apply({**one, "cache": own}, token[:, None], mutable="cache")
                for one, own in zip((variables, serving), caches, strict=True)
            ]
            return [state["cache"] for _, state in steps], [out for out, _ in steps]

        return jax.lax.scan(step, [cache, cache], TOKENS.T)

    caches, (wanted, served) = both_decode(variables, serving)
    np.testing.assert_array_equal(served, wanted)
    jax.tree.map(np.testing.assert_array_equal, *caches)
    assert caches[0]["MultiHeadDotProductAttention_0"]["cache_index"] == 4
