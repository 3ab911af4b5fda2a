"""MaxText's decoders of Linen and of NNX, quantized by its own rules of Qwix.

In training, in prefill and in decoding, with no line of MaxText changed.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
import pytest
import qwix
from flax import nnx
from maxtext.common.common_types import (
    MODEL_MODE_AUTOREGRESSIVE,
    MODEL_MODE_PREFILL,
)
from maxtext.configs import pyconfig
from maxtext.layers.quantizations import get_quantization_rule
from maxtext.utils.model_creation_utils import from_config

from aqtlite import config, rules
from aqtlite.flax import convert, quantize_model
from aqtlite.flax import nnx as aqt_nnx
from tests.flax.support import init
from tests.models import support

pytestmark = pytest.mark.slow

SIZES = {
    "base_emb_dim": 32,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "base_mlp_dim": 64,
    "base_num_decoder_layers": 2,
    "head_dim": 8,
    "vocab_size": 32,
    "max_target_length": 12,
    "max_prefill_predict_length": 8,
    "per_device_batch_size": 2,
}
CPU = {
    "attention": "dot_product",
    "dataset_type": "synthetic",
    "dtype": "float32",
    "enable_checkpointing": False,
    "log_config": False,
    "run_name": "test",
    "skip_jax_distributed_system": True,
}
NNX = {"enable_nnx": True, "pure_nnx": True, "pure_nnx_decoder": True}
INT8 = {"quantization": "int8", "use_qwix_quantization": True}

TOKENS = jnp.asarray(np.random.default_rng(0).integers(3, 32, (2, 12)), jnp.int32)
POSITIONS = jnp.broadcast_to(jnp.arange(12), (2, 12))
ARGS = TOKENS, POSITIONS, jnp.ones((2, 12), jnp.int32)
OF_PROMPT = tuple(x[:, :8] for x in ARGS)
FLOAT = {"enable_dropout": False}

LAYOUTS = {
    "scanned": {"scan_layers": True, "remat_policy": "full"},
    "apart": {"scan_layers": False, "remat_policy": "minimal"},
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)

PATHS = {
    f"self_attention/{name}"
    for name in (
        *("query", "key", "value", "out"),
        "attention_op/btkgd,bskd->bkgts",
        "attention_op/bkgts,bskd->btkgd",
    )
} | {"mlp/wi_0", "mlp/wi_1", "mlp/wo"}
"""Of a layer. Its norms multiply by einsums that sum nothing, and stay in float."""


def config_of(layout, **fields):
    page = pathlib.Path(maxtext.__file__).parent / "configs" / "base.yml"
    chosen = {**SIZES, **CPU, **LAYOUTS[layout], "decoder_block": "llama2", **fields}
    return pyconfig.initialize([None, str(page)], **chosen)


def of_layers(layout):
    """Paths of the contractions of all layers, as they are written in the program."""
    names = ["layers"] if layout == "scanned" else ["layers_0", "layers_1"]
    return {f"decoder/{name}/{path}" for name in names for path in PATHS}


def rules_of(layout, **fields):
    return get_quantization_rule(config_of(layout, **INT8, **fields))


def decoded(prefill, decode, state):
    """Logits of the prompt, and of three steps."""
    logits, state = prefill(state)
    found = [logits]
    for i in range(8, 11):
        token, position = TOKENS[:, i : i + 1], POSITIONS[:, i : i + 1]
        logits, state = decode(state, token, position)
        found.append(logits)
    return found


def assert_equal_logits(one, other):
    for logits, served in zip(one, other, strict=True):
        assert np.isfinite(logits).all()
        np.testing.assert_array_equal(logits, served)


class OfLinen:
    """What a user of the Linen decoder does."""

    def __init__(self, layout, **fields):
        self.model = from_config(config_of(layout, **fields))

    @functools.cached_property
    def variables(self):
        return init(self.model, *ARGS, **FLOAT)

    def loss(self, model, params):
        logits = model.apply({"params": params}, *ARGS, **FLOAT)
        return support.cross_entropy(logits, TOKENS)

    def trained(self, model):
        loss = functools.partial(self.loss, model)
        return support.trained(loss, self.variables["params"])

    def decoded(self, model, variables):
        options = FLOAT | {"mutable": ["cache"], "rngs": {"params": jax.random.key(0)}}

        @jax.jit
        def prefill(variables):
            mode = MODEL_MODE_PREFILL
            logits, made = model.apply(
                variables, *OF_PROMPT, model_mode=mode, **options
            )
            return logits, {**variables, **made}

        @jax.jit
        def decode(variables, token, position):
            mode = MODEL_MODE_AUTOREGRESSIVE
            logits, made = model.apply(
                variables, token, position, model_mode=mode, **options
            )
            return logits, {**variables, **made}

        return decoded(prefill, decode, variables)


@every_layout
@pytest.mark.parametrize("of_maxtext", [True, False], ids=["own", "all"])
def test_linen_is_trained_served_and_decodes(layout, of_maxtext):
    own = OfLinen(layout)
    chosen = (
        rules.from_qwix(rules_of(layout)) if of_maxtext else config.fully_quantized()
    )
    model = quantize_model(own.model, chosen)
    params, losses = own.trained(model)
    support.assert_trained_alike(losses, own.trained(own.model)[1])
    variables = {"params": params}
    serving = convert(model, variables, *ARGS, **FLOAT)
    run = jax.jit(lambda variables: model.apply(variables, *ARGS, **FLOAT))
    np.testing.assert_array_equal(run(serving), run(variables))
    assert_equal_logits(own.decoded(model, variables), own.decoded(model, serving))


@every_layout
def test_linen_has_the_paths_of_modules_and_what_qwix_quantizes(layout):
    own = OfLinen(layout)
    model = quantize_model(own.model, config.fully_quantized())
    planned = model.plan(own.variables, *ARGS, **FLOAT)
    found = {one.path.partition("/")[2] for one in planned.quantized()}
    assert found == of_layers(layout) | {"decoder/logits_dense"}
    theirs = rules_of(layout)
    model = quantize_model(own.model, rules.from_qwix(theirs))
    count = len(model.plan(own.variables, *ARGS, **FLOAT).quantized())
    of_qwix = qwix.quantize_model(own.model, qwix.QtProvider(theirs))
    call = functools.partial(of_qwix.apply, **FLOAT)
    assert support.quantized_by_qwix(call, own.variables, *ARGS) == count


def of_nnx(layout):
    settings = config_of(layout, **NNX)
    return from_config(settings, rngs=nnx.Rngs(0), model_mode=MODEL_MODE_PREFILL)


def loss_of_nnx(model):
    return support.cross_entropy(model(*ARGS, **FLOAT), TOKENS)


def train_nnx(model):
    def loss(params):
        return loss_of_nnx(nnx.merge(graph, params, others, copy=True))

    graph, params, others = nnx.split(model, nnx.Param, ...)
    params, losses = support.trained(loss, params)
    nnx.update(model, params)
    return losses


def decoded_by_nnx(model):
    graph, state = nnx.split(model)

    def run(state, *args, **kwargs):
        copy = nnx.merge(graph, state, copy=True)
        logits = copy(*args, **FLOAT, **kwargs)
        return logits, nnx.state(copy)

    @jax.jit
    def prefill(state):
        return run(state, *OF_PROMPT, model_mode=MODEL_MODE_PREFILL)

    @jax.jit
    def decode(state, token, position):
        return run(state, token, position, model_mode=MODEL_MODE_AUTOREGRESSIVE)

    return decoded(prefill, decode, state)


@every_layout
def test_nnx_is_trained_served_and_decodes(layout):
    chosen = rules.from_qwix(rules_of(layout, **NNX))
    model = aqt_nnx.quantize_model(of_nnx(layout), chosen)
    losses = train_nnx(model)
    support.assert_trained_alike(losses, train_nnx(of_nnx(layout)))
    serving = aqt_nnx.convert(model, *ARGS, **FLOAT)
    run = nnx.jit(lambda model: model(*ARGS, **FLOAT))
    np.testing.assert_array_equal(run(serving), run(model))
    assert_equal_logits(decoded_by_nnx(model), decoded_by_nnx(serving))


@every_layout
def test_nnx_quantizes_what_qwix_does(layout):
    theirs = rules_of(layout, **NNX)
    model = aqt_nnx.quantize_model(of_nnx(layout), rules.from_qwix(theirs))
    count = len(aqt_nnx.plan(model, *ARGS, **FLOAT).quantized())
    assert count == 7 * (1 if layout == "scanned" else 2)
    provider = qwix.QtProvider(theirs)
    of_qwix = qwix.quantize_model(of_nnx(layout), provider, *ARGS, **FLOAT)
    graph, state = nnx.split(of_qwix)

    def call(state):
        return nnx.merge(graph, state, copy=True)(*ARGS, **FLOAT)

    assert support.quantized_by_qwix(call, state) == count
