"""Fine-tune with LoRA and QLoRA, beside Qwix's provider of both.

    python -m benchmarks.lora [--seeds N] [--steps N] [--width N] [--json FILE]

A transformer of the demo learns the bytes of Python's standard library, and adapters of
its dense layers then learn those of short stories, on the same batches for all: of
float weights, of nf4 in blocks of 64, and of nf4 by Qwix. Contestants take turns at
every step of one process. The file holds what is measured after each seed; a run that
is stopped goes on from there.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import linen as nn
from flax import traverse_util
from rich.console import Console
from rich.table import Table

from aqtlite import Rule, config, numerics
from aqtlite.flax import convert, quantize_model, with_adapters
from aqtlite_demo import corpus, stories
from aqtlite_demo.model import Transformer

RANK, ALPHA, BLOCK = 8, 16, 64
LAYERS = ".*(Dense_.*|query|key|value|out|logits)"
NF4 = config.update(
    config.weight_only(bits=4),
    {
        "fwd.rhs": config.Tensor(
            numerics=numerics.NormalFloat(), blocks=config.Blocks(size=BLOCK, fit=True)
        )
    },
)
CONTESTANTS = ("float", "nf4", "nf4, Qwix")


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A model whose adapters are trained."""

    apply: Callable[[Any, Any, jax.Array], jax.Array]
    """Function from adapters, base and tokens to logits."""

    adapters: Any
    base: Any


def ours(model: Transformer, variables: Any, tokens: Any, cfg: Any) -> Contestant:
    """Adapters of rules."""
    rule = Rule(module=LAYERS, cfg=cfg, adapter=config.Lora(RANK, ALPHA))
    adapted = quantize_model(model, [rule])
    base = variables if cfg is None else convert(adapted, variables, tokens)

    def apply(adapters: Any, base: Any, tokens: jax.Array) -> jax.Array:
        return adapted.apply(with_adapters(base, adapters), tokens)

    return Contestant(apply, adapted.init_adapters(base, tokens), base)


def theirs(model: Transformer, variables: Any, tokens: Any) -> Contestant:
    """Adapters of Qwix's provider."""
    # PEFT's range, as ours has. Qwix's own is wider, which acts as a higher rate.
    first = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
    common = {
        "rank": RANK,
        "alpha": ALPHA,
        "weight_qtype": "nf4",
        "lora_a_initializer": first,
    }
    rules = [  # Tiles are along the first of two contracted axes: the heads.
        qwix.LoraRule(module_path=".*out", tile_size=1, **common),
        qwix.LoraRule(module_path=LAYERS, tile_size=BLOCK, **common),
    ]
    adapted = qwix.apply_lora_to_model(model, qwix.LoraProvider(rules))
    initial = jax.jit(adapted.init)(jax.random.key(0), tokens)["params"]
    abstract = traverse_util.flatten_dict(initial)
    abstract = {path: x for path, x in abstract.items() if not is_theirs(path)}
    base = qwix.quantize_params(
        variables["params"], traverse_util.unflatten_dict(abstract)
    )
    # Those of attention are made by a call only.
    _, made = adapted.apply(
        {"params": base}, tokens, mutable=["params"], rngs={"params": jax.random.key(0)}
    )
    flat = traverse_util.flatten_dict(made["params"])
    adapters = {path: x for path, x in flat.items() if is_theirs(path)}

    def apply(adapters: Any, base: Any, tokens: jax.Array) -> jax.Array:
        flat = traverse_util.flatten_dict(base)
        params = traverse_util.unflatten_dict({**flat, **adapters})
        return adapted.apply({"params": params}, tokens)

    return Contestant(apply, adapters, base)


def is_theirs(path: tuple[str, ...]) -> bool:
    """Whether a parameter is one of Qwix's adapters."""
    return "_lora_" in path[-1]


def loss_of(logits: jax.Array, batch: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats per byte."""
    wanted = batch[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean()


def trained(model: Transformer, steps: int, batch: int, seed: int) -> Any:
    """Variables of the model, which has learned the standard library."""
    tx = optax.adam(3e-3)
    data = corpus.standard_library(model.length)
    batches = data.batches(batch, model.length, seed)
    variables = jax.jit(model.init)(jax.random.key(seed), next(batches)[:, :-1])
    state = tx.init(variables)

    @jax.jit
    def step(variables: Any, state: Any, batch: jax.Array) -> Any:
        def loss_fn(variables: Any) -> jax.Array:
            return loss_of(model.apply(variables, batch[:, :-1]), batch)

        updates, state = tx.update(jax.grad(loss_fn)(variables), state)
        return optax.apply_updates(variables, updates), state

    for one in itertools.islice(batches, steps):
        variables, state = step(variables, state, one)
    return variables


def story_data(length: int) -> corpus.Corpus:
    """The bytes of short stories."""
    data = np.frombuffer(stories.write(4_000).encode(), np.uint8)
    held_out = len(data) // corpus.HELD_OUT
    return corpus.Corpus("stories", data[:-held_out], data[-held_out:])


def measured(asked: argparse.Namespace, seed: int) -> dict[str, dict[str, float]]:
    """Fine-tunes all contestants from one model."""
    model = Transformer(
        asked.layers, asked.width, 4, asked.length, dot_general=jax.lax.dot_general
    )
    variables = trained(model, asked.steps, asked.batch, seed)
    data = story_data(asked.length)
    held_out = data.validation_batches(8, asked.batch, asked.length)
    tokens = held_out[0][:, :-1]
    made = {
        "float": ours(model, variables, tokens, None),
        "nf4": ours(model, variables, tokens, NF4),
        "nf4, Qwix": theirs(model, variables, tokens),
    }
    tx = optax.adam(2e-3)
    steps, losses, adapters, states = {}, {}, {}, {}
    for name, one in made.items():

        def loss_fn(adapters: Any, base: Any, batch: Any, one: Contestant = one) -> Any:
            return loss_of(one.apply(adapters, base, batch[:, :-1]), batch)

        def step(adapters: Any, state: Any, base: Any, batch: Any, fn=loss_fn) -> Any:
            loss, gradients = jax.value_and_grad(fn)(adapters, base, batch)
            updates, state = tx.update(gradients, state)
            return optax.apply_updates(adapters, updates), state, loss

        adapters[name], states[name] = one.adapters, tx.init(one.adapters)
        given = adapters[name], states[name], one.base, held_out[0]
        steps[name] = jax.jit(step).lower(*given).compile()
        losses[name] = jax.jit(loss_fn)
    seconds: dict[str, list[float]] = {name: [] for name in made}
    batches = data.batches(asked.batch, asked.length, seed)
    for number, batch in enumerate(itertools.islice(batches, asked.steps)):
        for name in CONTESTANTS if number % 2 else CONTESTANTS[::-1]:
            start = time.perf_counter()
            adapters[name], states[name], loss = steps[name](
                adapters[name], states[name], made[name].base, batch
            )
            loss.block_until_ready()
            seconds[name].append(time.perf_counter() - start)
    return {
        name: {
            "before": validation(losses[name], one.adapters, one.base, held_out),
            "after": validation(losses[name], adapters[name], one.base, held_out),
            "seconds": statistics.median(seconds[name]),
            "base_bytes": bytes_of(one.base),
            "temporary_bytes": steps[name].memory_analysis().temp_size_in_bytes,
        }
        for name, one in made.items()
    }


def validation(loss: Any, adapters: Any, base: Any, batches: Any) -> float:
    """Mean loss over batches."""
    return float(np.mean([loss(adapters, base, batch) for batch in batches]))


def bytes_of(tree: Any) -> int:
    """Bytes of arrays, those of 4 bits packed."""
    return sum(
        x.size * jnp.finfo(x.dtype).bits // 8
        if jnp.issubdtype(x.dtype, jnp.floating)
        else x.size * jnp.iinfo(x.dtype).bits // 8
        for x in jax.tree.leaves(tree)
    )


def table(by_seed: dict[str, dict[str, dict[str, float]]]) -> Table:
    """The figures: a loss for each seed, and the median of the others."""
    result = Table("base", "loss before", "after", "step", "base, MB", "temporary, MB")
    for name in CONTESTANTS:
        rows = [one[name] for one in by_seed.values()]
        ratios = [
            one[name]["seconds"] / one["float"]["seconds"] for one in by_seed.values()
        ]
        result.add_row(
            name,
            " ".join(f"{row['before']:.3f}" for row in rows),
            " ".join(f"{row['after']:.3f}" for row in rows),
            f"{statistics.median(ratios):.2f} x",
            f"{rows[0]['base_bytes'] / 1e6:.2f}",
            f"{rows[0]['temporary_bytes'] / 1e6:.2f}",
        )
    return result


def main() -> None:
    """Measure seed by seed, and print the table."""
    command = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        *(("seeds", 3), ("steps", 200), ("width", 192), ("layers", 4)),
        *(("length", 64), ("batch", 8)),
    ):
        command.add_argument(f"--{name}", type=int, default=default)
    command.add_argument("--json", type=pathlib.Path, metavar="FILE")
    asked = command.parse_args()
    held: dict[str, Any] = {}
    if asked.json is not None and asked.json.exists():
        held = json.loads(asked.json.read_text())
    for seed in range(asked.seeds):
        if str(seed) not in held:
            held[str(seed)] = measured(asked, seed)
            if asked.json is not None:
                asked.json.write_text(json.dumps(held, indent=1))
        Console().print(table(held))


if __name__ == "__main__":
    main()
