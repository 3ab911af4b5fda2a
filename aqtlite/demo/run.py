"""The steps of the demo, in order."""

import dataclasses
import pathlib
import tempfile
from collections.abc import Mapping

import jax
import numpy as np
import rich.console

from aqtlite import config
from aqtlite.demo import artifact, corpus, progress, report, serving, training
from aqtlite.demo.model import Transformer
from aqtlite.demo.options import Options
from aqtlite.errors import UserError


def run(options: Options, console: rich.console.Console | None = None) -> bool:
    """Train, convert, save, serve and report.

    Args:
        options: options of the run.
        console: where to print; None is the terminal.

    Returns:
        True if training ended with finite losses and the served logits equal the
        trained ones bit for bit.

    Raises:
        UserError: if the text or the output folder cannot be used.
    """
    console = console or rich.console.Console(highlight=False, markup=False)
    artifact.quiet_logging()
    _make_writable(options.out)
    text = corpus.load(options.text, options.length)
    models = build_models(options)
    _introduce(console, options, text, models)

    validation = text.validation_batches(
        options.validation_batches, options.batch, options.length
    )
    with progress.training_progress(console, options.steps) as on_step:
        runs = training.train_side_by_side(
            models,
            text.batches(options.batch, options.length, options.seed),
            validation,
            steps=options.steps,
            lr=options.lr,
            seed=options.seed,
            on_step=on_step,
        )

    tokens = validation[0][:, :-1]
    prompt = tokens[0, : options.prompt_length]
    found, samples = {}, {}
    for name, trained in runs.items():
        folder = options.out / name
        with progress.working(console, f"serving {name} from a fresh process"):
            served = _serve(folder, trained, tokens, prompt, options)
        found[name] = report.figures(trained, artifact.checkpoint_bytes(folder), served)
        samples[name] = np.array(served.sample)

    console.print(report.sample("prompt, from the held-out text", prompt))
    for name, sample in samples.items():
        console.print(report.sample(f"{name}, served, goes on", sample))
    console.print(report.table(found))
    _write_files(console, options, runs, found)
    problems = report.failures(found)
    for line in problems:
        progress.say(console, line, style="bold red")
    return not problems


def build_models(options: Options) -> dict[str, Transformer]:
    """The two models to compare; they differ in their `cfg` alone."""
    sizes = {name: getattr(options, name) for name in artifact.SIZES}
    cfg = config.fully_quantized(fwd_bits=options.fwd_bits, bwd_bits=options.bwd_bits)
    return {
        "float32": Transformer(**sizes),
        options.quantized_name: Transformer(**sizes, cfg=cfg),
    }


def _serve(
    folder: pathlib.Path,
    trained: training.Trained,
    tokens: np.ndarray,
    prompt: np.ndarray,
    options: Options,
) -> serving.Served:
    """Convert and save a trained model, and serve it from a fresh process."""
    model, variables = trained.model, trained.variables
    artifact.save(folder, model, artifact.serving_variables(model, variables))
    return serving.serve_in_fresh_process(
        folder,
        tokens=tokens,
        trained_logits=serving.forward(model, variables, tokens),
        prompt=prompt,
        new_tokens=options.generated_tokens,
        seed=options.seed,
        cache="float32" if model.cfg is None else options.cache,
    )


def _make_writable(out: pathlib.Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as e:
        raise UserError(f"cannot write to --out {out}: {e.strerror}") from e


def _introduce(
    console: rich.console.Console,
    options: Options,
    text: corpus.Corpus,
    models: Mapping[str, Transformer],
) -> None:
    model = models["float32"]
    tokens = jax.ShapeDtypeStruct((1, options.length), "int32")
    abstract = jax.eval_shape(model.init, jax.random.key(0), tokens)
    weights = sum(x.size for x in jax.tree.leaves(abstract))
    progress.say(
        console,
        f"{text.name}: {len(text.training) / 1e6:.2f} MB to train on, "
        f"{len(text.validation) / 1e6:.2f} MB held out",
    )
    progress.say(
        console,
        f"{' and '.join(models)}: {options.layers} layers of width {options.width}, "
        f"{weights / 1e6:.2f} million weights; {options.steps} steps of "
        f"{options.batch} x {options.length} bytes",
    )


def _write_files(
    console: rich.console.Console,
    options: Options,
    runs: Mapping[str, training.Trained],
    found: Mapping[str, report.Figures],
) -> None:
    chosen = {
        name: str(value) if isinstance(value, pathlib.Path) else value
        for name, value in dataclasses.asdict(options).items()
    }
    report.write_figures(options.out / "figures.json", chosen, found)
    curves = options.out / "loss.png"
    if report.plot_curves(curves, runs):
        progress.say(console, f"loss curves: {curves}")
    else:
        progress.say(console, "no loss curves: pip install matplotlib for them")
    progress.say(console, f"checkpoints and figures: {options.out}")
