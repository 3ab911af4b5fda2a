"""A character transformer in NNX that trains in int8, and generates with int8 caches.

Run ``python examples/char_transformer_nnx.py``; the text is the source of a module of
Python's standard library.
"""

import argparse
import functools
import inspect
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from aqtlite import Rule, config, kv_cache
from aqtlite.flax.nnx import Call, convert, quantize_model

CACHE = config.qat(8)  # keys and values in int8, queries and probabilities, too


class Block(nnx.Module):
    """Attention and an MLP, each behind a LayerNorm."""

    def __init__(self, width, heads, rngs):
        self.heads = heads
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x, cache=None):
        qkv = self.qkv(self.norms[0](x))
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], 3 * self.heads, -1), 3, axis=2)
        if cache is None:
            attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        else:
            cache = kv_cache.append(cache, k, v, CACHE)
            attended = kv_cache.attend(q, cache, CACHE)
        x = x + self.out(attended.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x)))), cache


class Transformer(nnx.Module):
    """Logits of the next byte."""

    def __init__(self, layers, width, heads, length, rngs):
        self.length, self.width, self.heads = length, width, heads
        self.tokens = nnx.Embed(256, width, rngs=rngs)
        self.positions = nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.logits = nnx.Linear(width, 256, rngs=rngs)

    def __call__(self, tokens):
        return self.decode(tokens, [None] * len(self.blocks), 0)[0]

    def decode(self, tokens, caches, start):
        """Logits of `tokens` at the positions from `start` on, and their caches."""
        x = self.tokens(tokens) + self.positions(start + jnp.arange(tokens.shape[1]))
        updated = []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block(x, cache)
            updated.append(cache)
        return self.logits(self.norm(x)), updated


@nnx.jit
def train_step(model, optimizer, windows):
    """One step of the optimizer, and the loss before it."""

    def loss_fn(model):
        logits = model(windows[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
        return losses.mean()

    loss, gradients = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


@functools.partial(nnx.jit, donate_argnames="caches")
def generate_step(model, caches, tokens, start, key):
    """Samples the token behind `tokens`."""
    logits, caches = model.decode(tokens, caches, start)
    sampled = jax.random.categorical(key, logits[:, -1:] / 0.7)
    return caches, sampled


def generate(model, caches, prompt, count):
    """The prompt and `count` tokens behind it."""
    caches, token = generate_step(model, caches, prompt, 0, jax.random.key(0))
    tokens = [prompt, token]
    for position in range(prompt.shape[1], prompt.shape[1] + count - 1):
        key = jax.random.key(position)
        caches, token = generate_step(model, caches, token, position, key)
        tokens.append(token)
    return np.concatenate(tokens, axis=1)


def main():
    """Trains, converts for all calls, and generates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--smoke", action="store_true", help="a few steps, as a check")
    args = parser.parse_args()
    steps, layers, width = (2, 1, 32) if args.smoke else (args.steps, 2, 128)
    length, count = (16, 4) if args.smoke else (128, 100)

    text = np.frombuffer(inspect.getsource(textwrap).encode(), np.uint8).astype(int)
    model = Transformer(layers, width, 4, length, nnx.Rngs(0))
    # Weights in int8, forward and backward; attention in float while training.
    rules = [Rule(operands="weight", cfg=config.fully_quantized())]
    model = quantize_model(model, rules)
    optimizer = nnx.Optimizer(model, optax.adamw(2e-3), wrt=nnx.Param)

    rng = np.random.default_rng(0)
    for step in range(steps):
        starts = rng.integers(0, len(text) - length - 1, (8, 1))
        windows = jnp.asarray(text[starts + np.arange(length + 1)])
        loss = train_step(model, optimizer, windows)
        if step % 100 == 0:
            print(f"step {step:4d}  loss {loss:.4f}")

    shape = (1, length, 4, width // 4)
    caches = [kv_cache.empty(shape, jnp.float32, CACHE) for _ in range(layers)]
    prompt = jnp.asarray(np.frombuffer(b"    def ", np.uint8).astype(int))[None]
    calls = [
        Call(windows[:, :-1]),
        Call(prompt, caches, 0, method="decode"),
        Call(prompt[:, :1], caches, 8, method="decode"),
    ]
    serving = convert(model, calls=calls, report=print)
    print("key cache in", caches[0].key.qvalue.dtype)
    print(bytes(generate(serving, caches, prompt, count)[0].tolist()).decode("latin1"))


if __name__ == "__main__":
    main()
