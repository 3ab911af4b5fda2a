"""What comparisons of methods for trained models share: a float model and its loss."""

import argparse
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization

from aqtlite_demo import corpus as corpus_lib
from aqtlite_demo import training as demo_training
from aqtlite_demo.model import Transformer
from benchmarks.harness import arguments as arguments_lib
from benchmarks.quality import presets, records, training


def parser(file: str, doc: str) -> argparse.ArgumentParser:
    """Parser of the command line of a comparison, with its seeds and its size."""
    result = argparse.ArgumentParser(
        prog=f"python -m benchmarks.quality.{pathlib.Path(file).stem}",
        description=doc.splitlines()[0],
    )
    result.add_argument(
        "--seeds", nargs="+", type=arguments_lib.natural, default=[0, 1, 2]
    )
    result.add_argument("--quick", action="store_true")
    result.add_argument(
        "--models",
        type=pathlib.Path,
        metavar="FOLDER",
        help="where trained models are kept, and found by the next comparison",
    )
    return result


def sizes(asked: argparse.Namespace) -> tuple[training.Options, corpus_lib.Corpus]:
    """The size of the model and its training, and the text."""
    options = training.QUICK
    if not asked.quick:
        options = training.Options(layers=3, width=128, validation_batches=16)
    return options, corpus_lib.standard_library(options.length)


def trained(
    options: training.Options,
    corpus: corpus_lib.Corpus,
    seed: int,
    models: pathlib.Path | None = None,
) -> Any:
    """The variables of a transformer trained in float32.

    Args:
        options: sizes of the model and its training.
        corpus: text.
        seed: seed of the first weights and of the order of the text.
        models: folder of models that are trained already, which gets this one.
    """
    preset = presets.select(presets.FLOAT32)
    if models is None:
        return _train(preset, options, corpus, seed)
    run = records.run_hash(preset, options, corpus)
    path = models / f"{run}-{seed}.msgpack"
    if not path.exists():
        variables = _train(preset, options, corpus, seed)
        models.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_bytes(serialization.msgpack_serialize(variables))
        partial.rename(path)
    return jax.tree.map(jnp.asarray, serialization.msgpack_restore(path.read_bytes()))


def _train(
    preset: presets.Preset,
    options: training.Options,
    corpus: corpus_lib.Corpus,
    seed: int,
) -> Any:
    step, _ = training.programs(preset, options)
    variables, opt_state = training.initial(preset, options, corpus, seed)
    batches = corpus.batches(options.batch, options.length, seed)
    key = jax.random.key(seed)
    for _ in range(options.steps):
        variables, opt_state, _ = step(variables, opt_state, next(batches), key)
    return variables


def transformer(options: training.Options, **how: Any) -> Transformer:
    """The transformer that is trained, with other fields such as ``cfg=``."""
    return Transformer(
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        length=options.length,
        **how,
    )


def validation_loss(
    options: training.Options, corpus: corpus_lib.Corpus
) -> Callable[[Any, Any], float]:
    """The loss on held-out text, a function of a model and its variables."""
    validation = corpus.validation_batches(
        options.validation_batches, training.VALIDATION_BATCH, options.length
    )

    def loss(model: Any, variables: Any) -> float:
        evaluation = jax.jit(functools.partial(demo_training.loss_fn, model))
        return float(np.mean([evaluation(variables, batch) for batch in validation]))

    return loss


def cell(values: list[float]) -> str:
    """The mean increase over seeds, with its standard deviation if there are some."""
    spread = f" ± {np.std(values, ddof=1):.4f}" if len(values) > 1 else ""
    return f"{np.mean(values):+.4f}{spread}"
