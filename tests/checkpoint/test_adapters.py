"""Conversions by rules with adapters: of the base alone, and with its adapters."""

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx

from aqtlite import Rule, checkpoint, config
from aqtlite.flax import adapters_of, quantize_model, with_adapters
from aqtlite.flax import nnx as aqt_nnx
from tests.checkpoint.support import assert_same, save
from tests.common import normal

pytestmark = pytest.mark.code("quick")

RULE = Rule(cfg=config.weight_only(8), adapter=config.Lora(2, 4, dropout=0.1))
X = normal((2, 16))


@pytest.mark.parametrize("has_adapters", [False, True])
def test_linen(has_adapters, tmp_path):
    model = quantize_model(nn.Dense(8), [RULE])
    params = {"kernel": normal((16, 8)), "bias": normal((8,))}
    float_variables = {"params": params}
    adapters = model.init_adapters(float_variables, X)
    adapters = jax.tree.map(lambda a: a + 0.3, adapters)
    whole = with_adapters(float_variables, adapters)
    source = save(tmp_path / "v", whole if has_adapters else float_variables, "msgpack")
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)
    serving = checkpoint.load_serving(tmp_path / "out", model)
    if has_adapters:
        assert_same(adapters_of(serving), adapters)
    serving = with_adapters(serving, adapters)
    np.testing.assert_array_equal(model.apply(serving, X), model.apply(whole, X))


@pytest.mark.parametrize("has_adapters", [False, True])
def test_nnx(has_adapters, tmp_path):
    layers = nnx.Sequential(nnx.Linear(16, 8, rngs=nnx.Rngs(0)))
    model = aqt_nnx.quantize_model(layers, [RULE])
    if has_adapters:
        aqt_nnx.init_state(model, X)
    state = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    source = save(tmp_path / "v", state, "msgpack")
    aqt_nnx.init_state(model, X)  # The source may have none, and the model some.
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)
    serving = checkpoint.load_serving(tmp_path / "out", model)
    found = jax.tree.leaves(nnx.state(serving, nnx.LoRAParam))
    assert len(found) == (2 if has_adapters else 0)
    aqt_nnx.init_state(serving, X)
    np.testing.assert_array_equal(serving(X), model(X))
