"""Compares random models before and after their conversion, bit for bit.

``python -m tests.flax.served_equals_trained --count 2000`` tells for each kind of
config how many models differ, and what makes each of them again. Models of the kinds
"presets", "grids" and "repeated" are trained before, and served by what was stored and
loaded.
"""

import argparse
import collections
import dataclasses
import pathlib
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import rich.console
from flax import serialization

import aqtlite
from aqtlite import checkpoint
from aqtlite.flax import convert
from aqtlite.quantization.states.state_collections import OF_GRADIENTS, STATISTICS
from tests.common import quick_jit
from tests.flax import random_models
from tests.progress import shown

PROGRAMS = ("jit", "step", "eager", "compiled")
_CLEAR_CACHES_EVERY = 20


@dataclasses.dataclass(frozen=True)
class Difference:
    """A model that is served otherwise than it was trained."""

    sample: random_models.Sample
    program: str
    detail: str

    def __str__(self) -> str:
        return f"{self.program}: {self.detail}\n  {self.sample}"


def differences(
    sample: random_models.Sample, programs: tuple[str, ...]
) -> list[Difference]:
    """The programs in which a model is served otherwise than it was trained.

    Args:
        sample: the model.
        programs: "jit" and "eager" compare the model's outputs in the same program;
            "step" those inside a jitted training step with jitted serving, "compiled"
            those of the jitted model with those of `compile_serving`.
    """
    model, variables = sample.model, trained_variables(sample)
    serving, args = serving_variables(sample, variables), sample.history.args
    found = []
    for program in programs:
        if program == "eager":
            trained, served = (model.apply(v, *args) for v in (variables, serving))
        else:
            apply = jax.jit(model.apply)
            if program == "compiled":
                served = aqtlite.compile_serving(model.apply, serving, *args)(*args)
            else:
                served = apply(serving, *args)
            run = _training_step(model) if program == "step" else apply
            trained = run(variables, *args)
        detail = _difference(np.asarray(trained), np.asarray(served))
        if detail:
            found.append(Difference(sample, program, detail))
    return found


def trained_variables(sample: random_models.Sample) -> dict[str, Any]:
    """The variables of a model after the training steps of its history."""
    model, variables = sample.model, sample.variables

    @quick_jit  # What is served only has to equal what these variables are.
    def step(variables, *args):
        def loss(trained, others):
            out, changed = model.apply(
                {**others, **trained}, *args, mutable=[STATISTICS]
            )
            # Bounded, as float16 needs it.
            return jnp.mean(jnp.tanh(out.astype(jnp.float32))), changed

        learned = ("params", OF_GRADIENTS)
        trained = {k: v for k, v in variables.items() if k in learned}
        others = {k: v for k, v in variables.items() if k not in learned}
        gradients, changed = jax.grad(loss, has_aux=True)(trained, others)
        params = jax.tree.map(
            lambda v, g: v - 0.1 * g, trained["params"], gradients.pop("params")
        )
        return {**others, **changed, **gradients, "params": params}

    for _ in range(sample.history.steps):
        variables = step(variables, *sample.args)
    return variables


def serving_variables(
    sample: random_models.Sample, variables: dict[str, Any]
) -> dict[str, Any]:
    """The serving variables of a trained model, stored and loaded by its history."""
    model, args, storage = sample.model, sample.args, sample.history.storage
    if storage == "memory":
        return convert(model, variables, *args)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if storage == "orbax":
            abstract = jax.eval_shape(lambda v: convert(model, v, *args), variables)
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(folder / "out", convert(model, variables, *args))
                checkpointer.wait_until_finished()
                return checkpointer.restore(folder / "out", abstract)
        source = folder / "float.msgpack"
        source.write_bytes(serialization.to_bytes(variables))
        suffix = ".safetensors" if storage == "converted safetensors" else ""
        checkpoint.convert_checkpoint(source, folder / f"out{suffix}", model, *args)
        return checkpoint.load_serving(folder / f"out{suffix}", model)


def _training_step(model: Any) -> Any:
    """The model's output in the program that computes gradients and updates."""

    @jax.jit
    def step(variables, *args):
        def loss(variables):
            out = model.apply(variables, *args)
            return jnp.mean(out.astype(jnp.float32) ** 2), out

        gradients, out = jax.grad(loss, has_aux=True)(variables)
        updated = jax.tree.map(lambda v, g: v - 0.1 * g, variables, gradients)
        return out, updated

    return lambda *args: step(*args)[0]


def _difference(trained: np.ndarray, served: np.ndarray) -> str | None:
    if (trained.dtype, trained.shape) != (served.dtype, served.shape):
        return f"{trained.dtype}{trained.shape} served as {served.dtype}{served.shape}"
    trained, served = (x.astype(np.float64) for x in (trained, served))
    differs = ~((trained == served) | (np.isnan(trained) & np.isnan(served)))
    if not differs.any():
        return None
    largest = np.max(np.abs(trained - served)[differs])
    return (
        f"{differs.sum()} of {differs.size} elements differ, by up to {largest:.2g} "
        f"where the largest is {np.max(np.abs(trained)):.2g}"
    )


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.flax.served_equals_trained",
        description="Compares random models before and after their conversion.",
    )
    parser.add_argument("--count", type=int, default=2000, help="models of each kind")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--kind",
        action="append",
        choices=random_models.KINDS,
        help="kind of config; may be given several times (default: all)",
    )
    parser.add_argument(
        "--program",
        action="append",
        choices=PROGRAMS,
        help="how models are run; may be given several times (default: jit)",
    )
    options = parser.parse_args()
    kinds = options.kind or list(random_models.KINDS)
    programs = tuple(options.program or ["jit"])
    console = rich.console.Console()
    seeds: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
    start = time.perf_counter()
    with shown(console, options.count * len(kinds)) as on_done:
        for done in range(options.count * len(kinds)):
            kind = kinds[done % len(kinds)]
            if done % _CLEAR_CACHES_EVERY == _CLEAR_CACHES_EVERY - 1:
                jax.clear_caches()
            sample = random_models.sample(kind, options.seed + done // len(kinds))
            for one in differences(sample, programs):
                console.print(str(one), soft_wrap=True, highlight=False)
                seeds[kind, one.program].append(sample.seed)
            on_done(", ".join(f"{k}/{p} {len(s)}" for (k, p), s in seeds.items()))
    console.print(f"{time.perf_counter() - start:.0f} s")
    for kind in kinds:
        for program in programs:
            differing = seeds[kind, program]
            console.print(
                f"{kind}, {program}: {len(differing)} of {options.count} models "
                f"differ; seeds {differing}",
                soft_wrap=True,
                highlight=False,
            )
    return 1 if any(seeds.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
