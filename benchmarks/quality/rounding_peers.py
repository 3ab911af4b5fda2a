"""Round the weights of a trained transformer by this library and by Qwix, and compare.

    python -m benchmarks.quality.rounding_peers [--seeds N ...] [--models FOLDER]
        [--quick]

As `benchmarks.quality.rounding`, on the grid that Qwix's GPTQ takes: symmetric, 4 bits,
with a scale for each 128 inputs by the largest magnitude. Needs the `test` extra. Qwix
gathers statistics for contractions of one axis, and rounds the output projection of
attention to nearest. Also prints the processor time of the rounding.
"""

import functools
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from aqtlite import calibration, config, numerics
from aqtlite.flax import calibrate_in_float, convert
from aqtlite_demo import corpus as corpus_lib
from benchmarks.harness.peers import awq, gptq, ptq, qep, qwix_model
from benchmarks.quality import after_training, rounding, training

SIZE = 128

_SYMMETRIC = {
    "fwd.rhs.numerics": numerics.IntSymmetric(bits=4),
    "fwd.rhs.calibration": calibration.AbsMax(),
}
OWN: dict[str, config.DotGeneral] = {
    "nearest": config.update(
        config.gptq(4, SIZE), {**_SYMMETRIC, "fwd.rhs.rounding": None}
    ),
    "GPTQ": config.update(config.gptq(4, SIZE), _SYMMETRIC),
    "GPTQ, own order": config.update(
        config.gptq(4, SIZE),
        {**_SYMMETRIC, "fwd.rhs.rounding": config.Gptq(act_order=False)},
    ),
    "GPTQ, affine, MseSearch": config.update(
        config.gptq(4, SIZE), {"fwd.rhs.calibration": calibration.MseSearch()}
    ),
}

Served = tuple[Any, Any, float]
"""A model, its variables, and the processor time of the rounding in seconds."""


def own(options: training.Options, cfg: Any, variables: Any, samples: Any) -> Served:
    """Rounds with this library."""
    model = after_training.transformer(options, cfg=cfg)
    if cfg.fwd.rhs.rounding is not None:
        variables = calibrate_in_float(model, variables, samples)
    served, seconds = _timed(lambda: convert(model, variables, samples[0]))
    return model, served, seconds


def rules_of(kind: type, options: training.Options, **fields: Any) -> list[Any]:
    """Qwix's rules, with a scale for each `SIZE` inputs or for all of fewer."""
    depth = options.width // options.heads
    paths = {".*/out": depth, ".*/Dense_1": 4 * options.width, ".*": options.width}
    return [
        kind(
            module_path=path,
            op_names=("dot_general",),
            weight_qtype="int4",
            tile_size=min(SIZE, inputs),
            **fields,
        )
        for path, inputs in paths.items()
    ]


def _float_model(options: training.Options) -> Any:
    # Qwix replaces the attribute of `jax.lax`, which is looked up by each call.
    def dot_general(*args: Any, **kwargs: Any) -> jax.Array:
        return jax.lax.dot_general(*args, **kwargs)

    return after_training.transformer(options, dot_general=dot_general)


def qwix_single_pass(
    method: Any,
    provider: type,
    rule: type,
    inference: type,
    options: training.Options,
    variables: Any,
    samples: Any,
) -> Served:
    """Rounds with a method of Qwix that takes the statistics of the float model."""
    model, rules = _float_model(options), rules_of(rule, options)
    stats: Any = {}
    if provider is not None:
        measured = qwix_model.quantize_model(model, provider(rules))
        for sample in samples:
            _, stats = measured.apply(
                {**variables, **stats}, sample, mutable="quant_stats"
            )
    served = qwix_model.quantize_model(model, inference(rules))
    abstract = jax.eval_shape(served.init, jax.random.key(0), samples[0])["params"]
    given = [stats["quant_stats"]] if stats else []
    params, seconds = _timed(
        lambda: method.quantize_params(variables["params"], abstract, *given)
    )
    return served, {"params": params}, seconds


def qwix_qep(options: training.Options, variables: Any, samples: Any) -> Served:
    """Rounds with Qwix's propagation of errors, one layer after the other."""
    model, rules = _float_model(options), rules_of(qep.QepRule, options)
    found, seconds = _timed(
        lambda: qep.quantize(model, samples, rules, variables=variables)
    )
    return found.model, {"params": found.params}, seconds


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    result = function()
    jax.block_until_ready([x for x in jax.tree.leaves(result) if hasattr(x, "dtype")])
    return result, time.process_time() - start


METHODS: dict[str, Callable[..., Served]] = {
    **{
        f"aqtlite: {name}": functools.partial(
            lambda cfg, options, *args: own(options, cfg, *args), cfg
        )
        for name, cfg in OWN.items()
    },
    "Qwix: nearest": functools.partial(
        qwix_single_pass, ptq, None, gptq.GptqRule, ptq.PtqProvider
    ),
    "Qwix: AWQ": functools.partial(
        qwix_single_pass,
        awq,
        awq.AwqCalibrationProvider,
        awq.AwqRule,
        awq.AwqInferenceProvider,
    ),
    "Qwix: GPTQ": functools.partial(
        qwix_single_pass,
        gptq,
        gptq.GptqCalibrationProvider,
        gptq.GptqRule,
        ptq.PtqProvider,
    ),
    "Qwix: QEP": qwix_qep,
}


def compared(
    options: training.Options,
    corpus: corpus_lib.Corpus,
    seed: int,
    models: pathlib.Path | None = None,
) -> dict[str, tuple[float, float]]:
    """The increase of the loss by each method, and its processor time."""
    variables = after_training.trained(options, corpus, seed, models)
    batches = corpus.batches(options.batch, options.length, seed + 1000)
    count = rounding.CALIBRATION_BATCHES
    samples = [next(batches)[:, :-1] for _ in range(count)]
    loss = after_training.validation_loss(options, corpus)
    exact = loss(after_training.transformer(options), variables)
    found = {}
    for name, method in METHODS.items():
        model, served, seconds = method(options, variables, samples)
        found[name] = loss(model, served) - exact, seconds
        print(f"seed {seed}, {name}: {found[name][0]:+.4f}, {seconds:.1f} s")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, rounds, and prints a table."""
    asked = after_training.parser(__file__, __doc__).parse_args(arguments)
    options, corpus = after_training.sizes(asked)
    runs = [compared(options, corpus, seed, asked.models) for seed in asked.seeds]
    print("\n| | increase | processor time, s |\n| --- | ---: | ---: |")
    for name in METHODS:
        increase = after_training.cell([run[name][0] for run in runs])
        seconds = np.median([run[name][1] for run in runs])
        print(f"| {name} | {increase} | {seconds:.1f} |")


if __name__ == "__main__":
    main()
