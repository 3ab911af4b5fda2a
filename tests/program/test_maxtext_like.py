"""A client like MaxText trains, converts and serves with the library's public names."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from aqtlite import config
from aqtlite.flax import QuantMode, convert
from tests.common import relative_error
from tests.flax.support import init
from tests.program.maxtext_like import Decoder, Quantization

TOKENS = jax.random.randint(jax.random.key(0), (2, 6), 0, 32)
INT8 = Quantization(((".*", config.fully_quantized()),))
MIXED = Quantization.of_file(
    {
        "layers/mlp_.*": {"bits": 4, "scale": 0.9},
        "layers/mlp_down": {"bits": 4, "tile_size": 16},
    }
)


@functools.cache
def variables():
    return init(Decoder(), TOKENS)


@pytest.mark.slow
@pytest.mark.code("quick")
def test_a_remat_policy_saves_quantized_operands():
    def gradients(params, quant, policy):
        model = Decoder(quant, policy)

        def loss(params):
            return jnp.mean(model.apply({"params": params}, TOKENS) ** 2)

        return jax.grad(loss)(params)

    @jax.jit
    def run(params):
        found = gradients(params, INT8, "save_quantized")
        return found, gradients(params, Quantization(), "full")

    found, in_float = run(variables()["params"])
    errors = jax.tree.map(relative_error, found, in_float)
    assert 0 < max(jax.tree.leaves(errors)) < 0.2


@pytest.mark.parametrize(
    "quant", [pytest.param(INT8, marks=pytest.mark.slow), MIXED], ids=["int8", "mixed"]
)
def test_what_is_trained_is_served(quant):
    model = Decoder(quant)
    serving = convert(model, variables(), TOKENS)
    to_serve = Decoder(dataclasses.replace(quant, mode=QuantMode.SERVE))

    @jax.jit
    def run(variables, serving):
        return model.apply(variables, TOKENS), to_serve.apply(serving, TOKENS)

    trained, served = run(variables(), serving)
    np.testing.assert_array_equal(served, trained)
    up, down = (
        nn.meta.unbox(serving["aqt"]["layers"][name]["kernel"]["rhs"])
        for name in ("mlp_up", "mlp_down")
    )
    assert up.numerics.bits == (4 if quant is MIXED else 8)
    num_blocks = down.scale.size // (2 * 16)  # of 2 layers, 16 features
    assert num_blocks == (2 if quant is MIXED else 1)
    with pytest.raises(ValueError, match="SERVE"):
        jax.eval_shape(to_serve.apply, variables(), TOKENS)


@pytest.mark.code("quick")
def test_frozen_weights_keep_logical_axes():
    serving = convert(Decoder(INT8), variables(), TOKENS)
    specs = nn.get_partition_spec(serving)["aqt"]["layers"]["mlp_up"]["kernel"]["rhs"]
    # As they are stored: the axis that is contracted is the last one.
    assert specs.qvalue == PartitionSpec("layers", "mlp", "embed")
    assert specs.scale == PartitionSpec("layers", "mlp", None)


@pytest.mark.code("quick")
def test_decoding_with_a_quantized_cache():
    quant = dataclasses.replace(INT8, mode=QuantMode.SERVE)
    model = Decoder(quant, decode=True)
    cache = init(model, TOKENS)["cache"]
    serving = convert(Decoder(INT8), variables(), TOKENS)

    @jax.jit
    def decode(serving, cache):
        def step(cache, token):
            out, updated = model.apply(
                {**serving, "cache": cache}, token[:, None], mutable=["cache"]
            )
            return updated["cache"], out[:, 0]

        logits = jax.lax.scan(step, cache, TOKENS.T)[1].swapaxes(0, 1)
        return logits, Decoder(INT8).apply(serving, TOKENS)

    # The cache quantizes keys and values as the contractions of training do.
    logits, wanted = decode(serving, cache)
    assert relative_error(logits, wanted) < 1e-3
    assert cache["layers"]["attention"]["cached_key"].qvalue.dtype == jnp.int8
