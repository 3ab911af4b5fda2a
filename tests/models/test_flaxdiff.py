"""flaxdiff's UNet, quantized with no line of it changed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flaxdiff.models.simple_unet import Unet

from aqtlite import config, rules
from aqtlite.flax import convert, quantize_model
from tests.common import normal
from tests.flax.support import init
from tests.models.support import assert_trained_alike, quantized_by_qwix, trained

pytestmark = pytest.mark.slow

MODEL = Unet(
    emb_features=16,
    feature_depths=(8, 16),
    attention_configs=(None, {"heads": 2}),
    num_res_blocks=1,
    norm_groups=4,
)
NOISE, TEXT = normal((2, 8, 8, 3)), normal((2, 4, 8), seed=1)
NOISY = NOISE + normal((2, 8, 8, 3), seed=2)
ARGS = NOISY, jnp.array([0.3, 0.7]), TEXT
COUNT = 50
RULES_OF_QWIX = [qwix.QtRule(module_path=".*", weight_qtype="int8", act_qtype="int8")]


def test_trained_and_served():
    variables = init(MODEL, *ARGS)
    model = quantize_model(MODEL, config.fully_quantized(), strict=True)
    assert len(model.plan(variables, *ARGS).quantized()) == COUNT

    def loss_of(model):
        return lambda params: jnp.mean((model.apply(params, *ARGS) - NOISE) ** 2)

    variables, losses = trained(loss_of(model), variables)
    _, in_float = trained(loss_of(MODEL), init(MODEL, *ARGS))
    assert_trained_alike(losses, in_float)
    serving = convert(model, variables, *ARGS, strict=True)
    run = jax.jit(model.apply)
    np.testing.assert_array_equal(run(serving, *ARGS), run(variables, *ARGS))


def test_rules_of_qwix_quantize_what_qwix_does():
    variables = init(MODEL, *ARGS)
    model = quantize_model(MODEL, rules.from_qwix(RULES_OF_QWIX))
    theirs = qwix.quantize_model(MODEL, qwix.QtProvider(RULES_OF_QWIX))
    count = quantized_by_qwix(theirs.apply, variables, *ARGS)
    assert len(model.plan(variables, *ARGS).quantized()) == count == COUNT
