"""Policy gradients in int8 with Tunix's Llama and its sampler, as they are.

As in ``rollouts.py``, the loss takes the sampler's log-probabilities for those of the
policy before the step. The sampler holds frozen integers, which `convert` makes anew
before each step. Needs ``pip install 'aqtlite[models]'``; run ``python
examples/rollouts_tunix.py``.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.llama3.model import Llama3, ModelConfig

import aqtlite
from aqtlite import config
from aqtlite.flax.nnx import convert, quantize_model

EQUALS, BEGIN = 10, 11
NEVER = 1000  # An id that no token has, for padding and the end.
PROMPT, ANSWER = 4, 2  # "75=" after the token of the beginning, and "12"
SAMPLES = 16

log_softmax = aqtlite.invariant(jax.nn.log_softmax)


class Tokenizer:
    """Digits and the sign "=", as the sampler wants a tokenizer."""

    def encode(self, text, **kwargs):
        return [EQUALS if letter == "=" else int(letter) for letter in text]

    def decode(self, ids, **kwargs):
        return "".join("=" if i == EQUALS else str(i) for i in ids)

    def bos_id(self):
        return BEGIN

    def eos_id(self):
        return NEVER

    def pad_id(self):
        return NEVER


def chosen(logits, tokens):
    """Log-probabilities of tokens."""
    out = log_softmax(logits.astype(jnp.float32))
    return jnp.take_along_axis(out, tokens[..., None], -1)[..., 0]


@nnx.jit
def train_step(model, optimizer, tokens, sampled, advantage):
    """A step of the optimizer, and the divergence of sampler and trainer before it."""
    count, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    causal = jnp.tril(jnp.ones((length, length), bool))
    mask = jnp.broadcast_to(causal, (count, length, length))

    def loss_fn(model):
        logits, _ = model(tokens, positions, None, mask)
        trained = chosen(logits[:, PROMPT - 1 : -1], tokens[:, PROMPT:])
        change = trained - sampled
        ratio = jnp.exp(change)
        clipped = jnp.clip(ratio, 0.8, 1.2)
        loss = -jnp.minimum(ratio * advantage, clipped * advantage).mean()
        return loss, (ratio - 1 - change).mean()

    (_, k3), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, gradients)
    return k3


def main():
    """Trains, and prints rewards and divergences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--smoke", action="store_true", help="a few steps, as a check")
    args = parser.parse_args()
    layers, width, questions, steps = 2, 32, 16, args.steps
    if args.smoke:
        layers, width, questions, steps = 1, 16, 2, 2

    heads, depth = 2, width // 2
    made = ModelConfig(
        num_layers=layers,
        vocab_size=width,  # The sampler's buffer of logits is as wide as the model.
        embed_dim=width,
        hidden_dim=2 * width,
        num_heads=heads,
        head_dim=depth,
        num_kv_heads=heads,
        rope_theta=10000,
        norm_eps=1e-5,
    )
    floats = Llama3(made, rngs=nnx.Rngs(0))
    model = quantize_model(floats, config.fully_quantized(), invariant=True)
    optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
    one = jnp.zeros((1, 1), int)
    refresh = nnx.jit(lambda model: convert(model, one, one, None, one[None] == 0))
    cache = CacheConfig(16, layers, heads, depth)
    sampler = Sampler(refresh(model), Tokenizer(), cache)

    rng, largest = np.random.default_rng(0), 0.0
    for step in range(steps):
        numbers = np.repeat(rng.integers(0, 10, (questions, 2)), SAMPLES, 0)
        sampler.transformer_state = nnx.state(refresh(model))
        out = sampler(
            [f"{a}{b}=" for a, b in numbers],
            max_generation_steps=ANSWER,
            temperature=1.0,
            top_p=1.0,
            seed=step,
            return_logits=True,
        )
        answers, logits = jnp.stack(out.tokens), jnp.stack(out.logits)
        total = numbers.sum(1)
        right = np.stack([total // 10, total % 10], 1)
        reward = (np.asarray(answers) == right).mean(1).reshape(questions, SAMPLES)
        centered = reward - reward.mean(1, keepdims=True)
        advantage = centered / (reward.std(1, keepdims=True) + 1e-4)
        tokens = jnp.concatenate([jnp.asarray(out.padded_prompt_tokens), answers], 1)
        sampled = jax.jit(chosen)(logits, answers)
        k3 = train_step(model, optimizer, tokens, sampled, advantage.reshape(-1, 1))
        largest = max(largest, float(k3))
        if step % 10 == 0:
            print(f"step {step:3d}  reward {reward.mean():.2f}  k3 {float(k3):.1e}")
    print("sampled as trained:", largest == 0)


if __name__ == "__main__":
    main()
