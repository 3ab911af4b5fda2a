"""The decoder in Linen, one layer after the other and scanned."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite import Rule, checkpoint, config, kv_cache, llm
from aqtlite.flax import convert, quantize_model
from aqtlite.qtensor.qtensor import QTensor
from tests.llm.support import (
    FAMILIES,
    FOLDER,
    check_close,
    metadata,
    quantized_weights,
    reference,
)

pytestmark = pytest.mark.code("quick")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family):
    tokens, wanted = reference(family)
    # One program for scanned layers; those of Gemma 3 differ in windows and ropes.
    model, variables = llm.load_linen(FOLDER / family, scan_layers=family != "qwen3")
    check_close(jax.jit(model.apply)(variables, jnp.asarray(tokens)), wanted)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_integers_of_a_file_are_kept(scan_layers, tmp_path):
    weights = quantized_weights("llama", lambda name: "_proj" in name)
    path = tmp_path / "quantized"
    checkpoint.save_quantized(
        path, weights, format="compressed-tensors", metadata=metadata("llama")
    )
    model, variables = llm.load_linen(path, scan_layers=scan_layers)
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = checkpoint.config_of(weights[name], axes=1)
    cfg = config.update(config.weight_only(), {"fwd.rhs": tensor})
    # The 48 inputs of down_proj make no blocks of 32: it is a float in the file.
    rules = [Rule(path=".*/(q|k|v|out|gate|up)", op="dot_general", cfg=cfg)]
    quantized, reports = quantize_model(model, rules), []
    tokens = jnp.asarray(reference("llama")[0])
    serving = convert(quantized, variables, tokens, report=reports.append)
    text = str(reports[0])
    assert text.count("integers as given") == (6 if scan_layers else 12)
    assert "again" not in text
    layers = serving["aqt"]["layers" if scan_layers else "layers_1"]
    q = layers["mlp"]["up"]["kernel"]["rhs"].in_own_order()
    values = q.qvalue[1] if scan_layers else q.qvalue
    np.testing.assert_array_equal(values, np.asarray(weights[name].qvalue).T)
    is_quantized = lambda x: isinstance(x, QTensor)  # noqa: E731
    floats = jax.tree.map(
        lambda x: x.dequant() if is_quantized(x) else x,
        variables,
        is_leaf=is_quantized,
    )
    wanted = jax.jit(model.apply)(floats, tokens)
    check_close(jax.jit(quantized.apply)(serving, tokens), wanted, 1e-5)


def test_a_quantized_cache_decodes_token_by_token():
    tokens, wanted = reference("mistral")
    tokens = jnp.asarray(tokens)
    model, variables = llm.load_linen(FOLDER / "mistral", scan_layers=True)
    decoder = dataclasses.replace(model, cache=kv_cache.config_for(8))
    shapes = jax.eval_shape(decoder.init, jax.random.key(0), tokens)["cache"]
    cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    @jax.jit
    def step(cache, token, start):
        given = {**variables, "cache": cache}
        return decoder.apply(given, token, start, mutable=["cache"])

    found = []
    for i in range(tokens.shape[1]):
        logits, changed = step(cache, tokens[:, i : i + 1], i)
        cache = changed["cache"]
        found.append(logits)
    check_close(jnp.concatenate(found, axis=1), wanted, 0.05)


def test_scanned_layers_by_rules_have_rotated_caches():
    """The rotation closes over arrays, and Flax's scan traces it twice."""
    tokens = jnp.asarray(reference("llama")[0])
    found = []
    for scan_layers in (True, False):
        model, variables = llm.load_linen(FOLDER / "llama", scan_layers=scan_layers)
        model = dataclasses.replace(model, cache=kv_cache.config_for(4))
        decoder = quantize_model(model, config.weight_only(8))
        shapes = jax.eval_shape(decoder.init, jax.random.key(0), tokens)["cache"]
        cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        given = {**variables, "cache": cache}
        call = jax.jit(decoder.apply, static_argnames="mutable")
        logits, changed = call(given, tokens[:, :-1], mutable=("cache",))
        given = {**variables, **changed}
        last, _ = call(
            given, tokens[:, -1:], start=tokens.shape[1] - 1, mutable=("cache",)
        )
        found.append(jnp.concatenate([logits, last], axis=1))
    check_close(*found, 0.02)


def test_what_a_scan_cannot_hold_is_refused():
    model, variables = llm.load_linen(FOLDER / "gemma3", scan_layers=True)
    decoder = dataclasses.replace(model, cache=kv_cache.config_for(8))
    with pytest.raises(ValueError, match="windows of .* so set scan_layers=False"):
        jax.eval_shape(decoder.init, jax.random.key(0), jnp.zeros((1, 4), int))
    ropes = (llm.Rope(), llm.Rope(interleaved=True), None)
    mixed = dataclasses.replace(model, cfg=dataclasses.replace(model.cfg, ropes=ropes))
    with pytest.raises(ValueError, match="interleaved in all layers or in none"):
        jax.eval_shape(mixed.apply, variables, jnp.zeros((1, 4), int))
