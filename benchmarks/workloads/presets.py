"""Training step of the demo's transformer with each preset, against float32 and int8.

python -m benchmarks --only presets
"""

from collections.abc import Callable
from typing import Any

import jax

from aqtlite_demo import corpus as corpus_lib
from benchmarks.harness import figures, timing
from benchmarks.harness.figures import Figure
from benchmarks.harness.options import Options
from benchmarks.quality import presets, training

QUICK_PRESETS = 3


def program(
    name: str, sizes: training.Options, corpus: corpus_lib.Corpus
) -> Callable[[], Any]:
    """The training step; each call continues from the previous call's variables."""
    preset = presets.select(name)
    step, _ = training.programs(preset, sizes)
    variables, opt_state = training.initial(preset, sizes, corpus, seed=0)
    batch = next(corpus.batches(sizes.batch, sizes.length, seed=0))
    key = jax.random.key(0)

    def run() -> Any:
        nonlocal variables, opt_state
        variables, opt_state, loss = step(variables, opt_state, batch, key)
        return variables, loss

    return run


def run(options: Options, report: Callable[[str], None]) -> list[Figure]:
    """Every preset of `benchmarks.quality`."""
    sizes = training.QUICK if options.quick else training.Options()
    names = list(presets.CONFIGS)[: QUICK_PRESETS if options.quick else None]
    report(f"{len(names)} presets, {sizes.layers} layers of width {sizes.width}")
    corpus = corpus_lib.standard_library(sizes.length)
    spreads = timing.alternate(
        {name: program(name, sizes, corpus) for name in names},
        repeats=options.repeats,
        seconds=options.seconds,
    )
    case = {"tokens": f"{sizes.batch} x {sizes.length}"}
    return figures.compare("presets", case, spreads)
