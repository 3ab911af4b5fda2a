"""Tunix's decoders, trainer and sampler, quantized with no line of theirs changed."""

import runpy
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen3 import model as qwen3
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

from aqtlite import Rule, config
from aqtlite.flax.nnx import Frozen, calibrate, convert, plan, quantize_model
from tests.test_examples import FOLDER

pytestmark = pytest.mark.slow

SIZES = {
    "num_layers": 2,
    "vocab_size": 32,
    "embed_dim": 32,
    "hidden_dim": 64,
    "num_heads": 4,
    "head_dim": 8,
    "num_kv_heads": 2,
    "rope_theta": 10000,
    "norm_eps": 1e-5,
}
OF_GEMMA = {
    name: size
    for name, size in SIZES.items()
    if name not in ("vocab_size", "rope_theta", "norm_eps")
} | {"sliding_window_size": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "llama": lambda: llama3.Llama3(llama3.ModelConfig(**SIZES), rngs=nnx.Rngs(0)),
    "llama, tied": lambda: llama3.Llama3(
        llama3.ModelConfig(**SIZES, weight_tying=True), rngs=nnx.Rngs(0)
    ),
    "qwen": lambda: qwen3.Qwen3(qwen3.ModelConfig(**SIZES), rngs=nnx.Rngs(0)),
    "qwen, experts": lambda: qwen3.Qwen3(
        qwen3.ModelConfig(**SIZES, **EXPERTS), rngs=nnx.Rngs(0)
    ),
    "gemma": lambda: gemma3.Gemma3(
        gemma3.ModelConfig(**OF_GEMMA, num_embed=32, param_dtype=jnp.float32),
        rngs=nnx.Rngs(0),
    ),
}
COUNTS = {"llama": 19, "llama, tied": 19, "qwen": 19, "qwen, experts": 41, "gemma": 17}
"""Contractions that are quantized. Tokens are sent to experts by products with one
element each, which sum nothing: they stay in float."""

TOKENS = np.array([[3, 5, 7, 9, 4, 6], [4, 8, 3, 5, 9, 7]])
POSITIONS = jnp.broadcast_to(jnp.arange(6), (2, 6))
MASK = jnp.broadcast_to(jnp.tril(jnp.ones((6, 6), bool)), (2, 6, 6))
ARGS = TOKENS, POSITIONS, None, MASK

every_model = pytest.mark.parametrize("name", MODELS)


class Tokenizer:
    """What a sampler needs."""

    def encode(self, text, **kwargs):
        return [3 + ord(letter) % 13 for letter in text]

    def decode(self, ids, **kwargs):
        return " ".join(map(str, ids))

    def bos_id(self):
        return 1

    def eos_id(self):
        return 2

    def pad_id(self):
        return 0


def trained(model):
    """The model after some steps of Tunix's trainer, and their losses."""
    losses = []

    def loss(model, input_tokens, input_mask):
        logits, _ = model(input_tokens, POSITIONS, None, MASK)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1], input_tokens[:, 1:]
        ).mean()

    trainer = PeftTrainer(
        model, optax.adam(1e-2), TrainingConfig(eval_every_n_steps=100, max_steps=5)
    ).with_loss_fn(loss)
    trainer.with_gen_model_input_fn(
        lambda x: {"input_tokens": x.input_tokens, "input_mask": x.input_mask}
    )
    one = TrainingInput(input_tokens=TOKENS, input_mask=np.ones((2, 6), np.int32))
    run = nnx.jit(lambda model: loss(model, TOKENS, None))
    losses.append(float(run(model)))
    trainer.train([one] * 5)
    losses.append(float(run(model)))
    return losses


def sampled(model, **kwargs):
    cache = CacheConfig(cache_size=32, num_layers=2, num_kv_heads=2, head_dim=8)
    sampler = Sampler(model, Tokenizer(), cache)
    return sampler(["hello", "ab"], max_generation_steps=6, **kwargs)


@every_model
def test_trained_sampled_and_served(name):
    floats, model = MODELS[name](), quantize_model(MODELS[name](), config.qat(8))
    assert len(plan(model, *ARGS).quantized()) == COUNTS[name]
    before, after = trained(model)
    of_floats = trained(floats)
    assert after < before - 0.5
    np.testing.assert_allclose([before, after], of_floats, rtol=0.05)
    serving = convert(model, *ARGS)
    run = nnx.jit(lambda model: model(*ARGS)[0])
    np.testing.assert_array_equal(run(serving), run(model))
    of_model, of_serving = sampled(model), sampled(serving)
    for one, other in zip(of_model.tokens, of_serving.tokens, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("preset", ["weight_only", "static_int8", "fully_quantized"])
def test_logits_of_the_sampler(preset):
    """Of prefill and of each step."""
    rules = [Rule(operands="weight", cfg=getattr(config, preset)())]
    model = quantize_model(MODELS["llama"](), rules)
    if preset == "static_int8":
        calibrate(model, [ARGS])
    serving = convert(model, *ARGS)
    one, other = (sampled(x, return_logits=True) for x in (model, serving))
    for logits, served in zip(one.logits, other.logits, strict=True):
        np.testing.assert_array_equal(logits, served)


def test_rollouts(monkeypatch, capsys):
    """Log-probabilities of the sampler are those of the trainer, bit for bit."""
    monkeypatch.setattr(sys, "argv", ["rollouts_tunix.py", "--smoke"])
    runpy.run_path(str(FOLDER / "rollouts_tunix.py"), run_name="__main__")
    assert "sampled as trained: True" in capsys.readouterr().out


def test_rules_name_experts_and_router():
    rules = [
        Rule(path="layers/.*/mlp/router", cfg=None),
        Rule(path="layers/.*/mlp.*", operands="weight", cfg=config.weight_only(4)),
        Rule(operands="weight", cfg=config.qat(8)),
    ]
    planned = plan(quantize_model(MODELS["qwen, experts"](), rules), *ARGS)
    of_rules = [sum(one.rule == i for one in planned.contractions) for i in range(3)]
    # For each layer: a router; three of each expert; four projections. And the logits.
    assert of_rules == [2, 2 * 4 * 3, 2 * 4 + 1]


def test_adapters_beside_frozen_weights():
    """Qwix's LoRA, trained by Tunix on a model that was converted without them."""
    floats = MODELS["llama"]()
    args = {
        "input_tokens": jnp.asarray(TOKENS),
        "positions": POSITIONS,
        "cache": None,
        "attention_mask": MASK,
    }
    provider = qwix.LoraProvider(module_path=".*(q|v)_proj", rank=4, alpha=2.0)
    adapted = qwix.apply_lora_to_model(floats, provider, rngs=nnx.Rngs(1), **args)
    rules = [
        Rule(path=r".*\bDr,r.*", cfg=None),
        Rule(operands="weight", cfg=config.weight_only(4)),
    ]
    serving = convert(quantize_model(adapted, rules), *ARGS)
    before = jax.tree.map(
        np.asarray, nnx.to_pure_dict(nnx.state(serving, nnx.LoRAParam))
    )
    frozen = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(serving, Frozen)))
    assert len(jax.tree.leaves(before)) == 8 and jax.tree.leaves(frozen)
    first, last = trained(serving)
    assert last < first
    after = nnx.to_pure_dict(nnx.state(serving, nnx.LoRAParam))
    assert all(
        (one != other).any()
        for one, other in zip(*map(jax.tree.leaves, (before, after)), strict=True)
    )
    now = nnx.to_pure_dict(nnx.state(serving, Frozen))
    jax.tree.map(np.testing.assert_array_equal, frozen, now)
