"""The steps of the demo, in order."""

import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import rich.console

from aqtlite import config
from aqtlite.errors import UserError
from aqtlite_demo import (
    artifact,
    corpus,
    progress,
    report,
    serving,
    snapshot,
    training,
)
from aqtlite_demo import tokens as tokens_lib
from aqtlite_demo.model import Transformer
from aqtlite_demo.options import Options


def run(options: Options) -> bool:
    """Train, convert, save, serve and report.

    Prints the result to standard output, and all else to standard error.

    Args:
        options: options of the run.

    Returns:
        True if training ended with finite losses and the served logits equal those of
        the trained model bit for bit.

    Raises:
        UserError: if the text or the output folder cannot be used.
    """
    console = rich.console.Console(stderr=True, highlight=False, markup=False)
    artifact.quiet_logging()
    _make_writable(options.out)
    text, tokenizer = corpus.load(options.text, options.length)
    models = build_models(options)
    _introduce(console, options, text, models)

    validation = text.validation_batches(
        options.validation_batches, options.batch, options.length
    )
    kept = snapshot.FileSnapshot(options, text)
    if kept.step:
        progress.say(
            console,
            f"an interrupted run goes on after step {kept.step}; --overwrite starts "
            "anew",
        )
    try:
        runs = _train(console, options, text, models, validation, kept)
        found, samples = _serve_all(console, options, runs, validation, tokenizer)
    except KeyboardInterrupt as error:
        if kept.step:
            error.add_note(f"The same command goes on after step {kept.step}")
        raise
    kept.discard()
    _write_files(console, options, runs, found)
    problems = report.failures(found)
    if options.json:
        print(json.dumps(report.as_dict(_chosen(options), found), indent=2))
    else:
        _print_results(options, samples, found, problems)
    for line in problems:
        progress.say(console, line, style="bold red")
    return not problems


def _train(
    console: rich.console.Console,
    options: Options,
    text: corpus.Corpus,
    models: Mapping[str, Transformer],
    validation: list[np.ndarray],
    kept: snapshot.FileSnapshot,
) -> dict[str, training.Trained]:
    names = list(models)
    with progress.training_progress(console, options.steps, names) as on_step:
        return training.train_side_by_side(
            models,
            text.batches(options.batch, options.length, options.seed),
            validation,
            steps=options.steps,
            lr=options.lr,
            seed=options.seed,
            on_step=on_step,
            snapshot=kept,
        )


def _serve_all(
    console: rich.console.Console,
    options: Options,
    runs: Mapping[str, training.Trained],
    validation: list[np.ndarray],
    tokenizer: tokens_lib.Tokenizer,
) -> tuple[dict[str, report.Figures], dict[str, str]]:
    """Figures and samples of every model, served from a fresh process."""
    tokens = validation[0][:, :-1]
    prompt = tokens[0, : options.prompt_length]

    def text(tokens: np.ndarray) -> str:
        return corpus.to_text(tokenizer.decode(tokens))

    found, samples = {}, {"prompt, from the held-out text": text(prompt)}
    for name, trained in runs.items():
        folder = options.out / name
        with progress.working(console, f"serving {name} from a fresh process"):
            served = _serve(folder, trained, tokens, prompt, options)
        found[name] = report.figures(trained, artifact.checkpoint_bytes(folder), served)
        samples[f"{name}, served, goes on"] = text(np.array(served.sample))
    return found, samples


def _print_results(
    options: Options,
    samples: Mapping[str, str],
    found: Mapping[str, report.Figures],
    problems: list[str],
) -> None:
    console = rich.console.Console(highlight=False, markup=False)
    for title, text in samples.items():
        console.print(report.sample(title, text))
    console.print(report.table(found))
    if not problems:
        console.print(report.conclusion(found))
        folder = options.out / options.quantized_name / artifact.CHECKPOINT
        console.print("\nNext, what is in the checkpoint that is served:")
        progress.say(console, f"  aqtlite show {folder}")


def build_models(options: Options) -> dict[str, Transformer]:
    """The two models to compare, which differ only in `cfg`."""
    sizes: dict[str, Any] = {
        "layers": options.layers,
        "width": options.width,
        "heads": options.heads,
        "length": options.length,
        "vocabulary": tokens_lib.VOCABULARY,
    }
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
        f"{text.name}: {len(text.training):,} tokens to train on, "
        f"{len(text.validation):,} held out",
    )
    progress.say(
        console,
        f"{' and '.join(models)}: {options.layers} layers of width {options.width}, "
        f"{weights / 1e6:.2f} million weights; {options.steps} steps of "
        f"{options.batch} x {options.length} tokens",
    )


def _write_files(
    console: rich.console.Console,
    options: Options,
    runs: Mapping[str, training.Trained],
    found: Mapping[str, report.Figures],
) -> None:
    text = json.dumps(report.as_dict(_chosen(options), found), indent=2)
    (options.out / "figures.json").write_text(text + "\n")
    plot = options.out / "loss.png"
    if report.plot(plot, runs, found):
        progress.say(console, f"plots of losses, times and sizes: {plot}")
    else:
        progress.say(console, "no plots: pip install matplotlib for them")
    progress.say(console, f"checkpoints and figures: {options.out}")


def _chosen(options: Options) -> dict[str, Any]:
    return {
        name: str(value) if isinstance(value, pathlib.Path) else value
        for name, value in dataclasses.asdict(options).items()
        if name not in ("overwrite", "json")
    }
