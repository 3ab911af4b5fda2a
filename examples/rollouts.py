"""Policy gradients in int8: the policy that samples is the policy that is trained.

A decoder learns sums by GRPO (Shao et al., 2024): it answers each question several
times, and answers that are better than the others of their group become likelier. The
sampler decodes token by token, with a KV cache and with int8 weights that every step
makes of the float ones, inside `jax.jit`. The loss takes the sampler's
log-probabilities for those of the policy before the step: nothing computes them again,
and no weight corrects them. How far both are apart is printed as k3, an estimate of
their divergence (http://joschu.net/blog/kl-approx.html).

Run ``python examples/rollouts.py --plot rollouts.png``.
"""

import argparse
import contextlib
import functools
import pathlib
import time
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.console
import rich.progress

from aqtlite import config
from aqtlite.flax import convert, quantize_model

DIGITS, ANSWER = 2, 2  # "75=12"
LENGTH = DIGITS + 1 + ANSWER
EQUALS, VOCABULARY = 10, 11
SAMPLES = 16  # answers to a question
UPDATES = 2  # steps of the optimizer with the same answers


class Decoder(nn.Module):
    """A decoder in bfloat16; returns log-probabilities of the next token."""

    layers: int
    width: int
    decode: bool = False

    @nn.compact
    def __call__(self, tokens, positions):
        of_dtype = {"dtype": jnp.bfloat16}
        norm = functools.partial(nn.LayerNorm, **of_dtype)
        x = nn.Embed(VOCABULARY, self.width, **of_dtype)(tokens)
        x = x + nn.Embed(LENGTH, self.width, **of_dtype)(positions)
        mask = None if self.decode else nn.make_causal_mask(tokens)
        for _ in range(self.layers):
            attention = nn.MultiHeadDotProductAttention(
                4, decode=self.decode, **of_dtype
            )
            x = x + attention(norm()(x), mask=mask)
            hidden = nn.gelu(nn.Dense(2 * self.width, **of_dtype)(norm()(x)))
            x = x + nn.Dense(self.width, **of_dtype)(hidden)
        logits = nn.Dense(VOCABULARY, **of_dtype)(norm()(x))
        return jax.nn.log_softmax(logits.astype(jnp.float32))


class Policy(NamedTuple):
    """The model as it is trained and as it samples, of the same parameters."""

    trained: nn.Module
    sampler: nn.Module
    refresh: Callable
    """Function of the variables and a call that returns the serving variables."""

    @classmethod
    def in_float(cls, layers, width):
        """A policy in bfloat16."""
        models = Decoder(layers, width), Decoder(layers, width, decode=True)
        return cls(*models, lambda variables, *call: variables)

    @classmethod
    def in_int8(cls, layers, width, **options):
        """A policy in int8, with options of `quantize_model`."""
        trained, sampler = (
            quantize_model(model, config.fully_quantized(), **options)
            for model in (Decoder(layers, width), Decoder(layers, width, decode=True))
        )

        def refresh(variables, *call):
            return convert(sampler, variables, *call, mutable=["cache"])

        return cls(trained, sampler, refresh)


POLICIES = {
    "bfloat16": Policy.in_float,
    "int8": Policy.in_int8,
    "int8, invariant": functools.partial(Policy.in_int8, invariant=True),
}


def log_probabilities(policy, variables, tokens):
    """Log-probabilities of each token behind the first, as in training."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    out = policy.trained.apply(variables, tokens, positions)
    return jnp.take_along_axis(out[:, :-1], tokens[:, 1:, None], 2)[..., 0]


def sample(policy, variables, cache, questions, key):
    """Questions with answers, and log-probabilities of each token behind the first."""
    call = questions[:, :1], jnp.zeros_like(questions[:, :1])
    serving = policy.refresh({**variables, "cache": cache}, *call)

    def body(carry, position):
        cache, token = carry
        out, changed = policy.sampler.apply(
            {**serving, "cache": cache},
            token,
            jnp.full(token.shape, position),
            mutable=["cache"],
        )
        out, cache = out[:, 0], changed["cache"]
        sampled = jax.random.categorical(jax.random.fold_in(key, position), out)
        asked = questions[:, jnp.minimum(position + 1, DIGITS)]
        token = jnp.where(position < DIGITS, asked, sampled)[:, None]
        return (cache, token), (token[:, 0], jnp.take_along_axis(out, token, 1)[:, 0])

    start = cache, questions[:, :1]
    _, (tokens, chosen) = jax.lax.scan(body, start, jnp.arange(LENGTH - 1))
    return jnp.concatenate([questions[:, :1], tokens.T], 1), chosen.T


def rewards(tokens):
    """The fraction of digits that are right."""
    total = tokens[:, :DIGITS].sum(1)
    right = jnp.stack([total // 10, total % 10], 1)
    return jnp.mean(tokens[:, -ANSWER:] == right, 1)


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3))


def make_step(policy, questions):
    """A step: samples, rewards, and updates of the parameters, in one program."""
    longest = jnp.zeros((questions * SAMPLES, LENGTH), int)
    made = jax.eval_shape(policy.sampler.init, jax.random.key(0), longest, longest)
    cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made["cache"])

    @jax.jit
    def step(variables, state, key):
        of_questions, of_answers = jax.random.split(key)
        asked = jax.random.randint(of_questions, (questions, DIGITS), 0, 10)
        asked = jnp.pad(asked, ((0, 0), (0, 1)), constant_values=EQUALS)
        tokens, sampled = sample(
            policy, variables, cache, jnp.repeat(asked, SAMPLES, 0), of_answers
        )
        reward = rewards(tokens).reshape(questions, SAMPLES)
        centered = reward - reward.mean(1, keepdims=True)
        advantage = centered / (reward.std(1, keepdims=True) + 1e-4)
        advantage = advantage.reshape(-1, 1)

        def loss_fn(variables):
            trained = log_probabilities(policy, variables, tokens)
            change = (trained - sampled)[:, -ANSWER:]
            ratio = jnp.exp(change)
            clipped = jnp.clip(ratio, 0.8, 1.2)
            loss = -jnp.minimum(ratio * advantage, clipped * advantage).mean()
            return loss, (ratio - 1 - change).mean()

        def update(carry, _):
            variables, state = carry
            gradients, k3 = jax.grad(loss_fn, has_aux=True)(variables)
            updates, state = OPTIMIZER.update(gradients, state)
            return (optax.apply_updates(variables, updates), state), k3

        after, k3 = jax.lax.scan(update, (variables, state), length=UPDATES)
        return *after, reward.mean(), k3[0]  # Of the parameters that sampled.

    return step


def train(policy, step, steps, seed, on_step):
    """Rewards and divergences of a run, by step."""
    tokens = jnp.zeros((1, LENGTH), int)
    variables = jax.jit(policy.trained.init)(jax.random.key(seed), tokens, tokens)
    state = OPTIMIZER.init(variables)
    measured = []
    for key in jax.random.split(jax.random.key(seed + 1), steps):
        variables, state, *found = step(variables, state, key)
        measured.append([float(x) for x in found])
        on_step(measured[-1][0])
    return np.array(measured).T


def draw(measured, path):
    """Plots rewards and divergences over steps, a line for each seed."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(9, 3.6), layout="constrained")
    of_rewards, of_divergences = picture.subplots(1, 2)
    for color, (name, runs) in enumerate(measured.items()):
        for number, (reward, divergence) in enumerate(runs):
            style = {"color": f"C{color}", "linewidth": 1, "alpha": 0.8}
            label = name if number == 0 else None
            smooth = np.convolve(reward, np.ones(10) / 10, "valid")
            of_rewards.plot(smooth, label=label, **style)
            of_divergences.plot(divergence, **style)
    of_rewards.set(xlabel="step", ylabel="reward, mean of 10 steps")
    of_rewards.legend()
    of_divergences.set(xlabel="step", ylabel="k3 of sampler and trainer")
    of_divergences.set_yscale("symlog", linthresh=1e-9)
    picture.savefig(path, dpi=120)


@contextlib.contextmanager
def progress(console, runs, steps):
    """Yields a function to call before each run, that returns one for each step."""
    if not console.is_terminal:
        yield lambda name: lambda reward: None
        return
    with rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeRemainingColumn(),
        console=console,
    ) as bar:
        task = bar.add_task("", total=runs * steps)

        def begin(name):
            bar.update(task, description=f"{name}: compiling")
            return lambda reward: bar.update(
                task, advance=1, description=f"{name}: reward {reward:.2f}"
            )

        yield begin


def main():
    """Trains all policies with all seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", metavar="FILE.png", type=pathlib.Path)
    parser.add_argument("--smoke", action="store_true", help="a few steps, as a check")
    args = parser.parse_args()
    if args.plot:
        import matplotlib  # noqa: F401  (of the extra `demo`; before the long run)
    sizes, questions, steps, seeds = (2, 64), 32, args.steps, args.seeds
    measured = {name: [] for name in POLICIES}
    if args.smoke:
        sizes, questions, steps, seeds = (1, 16), 2, 2, 1
        measured = {"int8, invariant": []}

    console = rich.console.Console()
    with progress(console, len(measured) * seeds, steps) as begin:
        for name, runs in measured.items():
            policy = POLICIES[name](*sizes)
            step = make_step(policy, questions)
            for seed in range(seeds):
                start = time.perf_counter()
                on_step = begin(f"{name}, seed {seed}")
                run = train(policy, step, steps, seed, on_step)
                runs.append(run)
                console.print(
                    f"{name:15} seed {seed}  reward {run[0, -20:].mean():.2f}  "
                    f"k3 mean {run[1].mean():.1e}, largest {run[1].max():.1e}  "
                    f"({time.perf_counter() - start:.0f} s)",
                    highlight=False,
                    soft_wrap=True,
                )
    runs = measured["int8, invariant"]
    print("sampled as trained:", all(run[1].max() == 0 for run in runs))
    if args.plot:
        draw(measured, args.plot)


if __name__ == "__main__":
    main()
