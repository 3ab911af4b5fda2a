"""The demo from beginning to end."""

import contextlib
import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np
import rich.console
import rich.progress

from aqtlite import config
from aqtlite.demo import artifact, corpus, report, serving, training
from aqtlite.demo.errors import UserError
from aqtlite.demo.model import Transformer
from aqtlite.demo.options import Options

PLAIN_LINES = 10
"""How often progress is printed where there is no terminal to draw a bar on."""


def run(options: Options, console: rich.console.Console | None = None) -> bool:
    """Trains, converts, saves, serves and reports.

    Args:
        options: what the user chose.
        console: where to print; None is the terminal.

    Returns:
        Whether all went well: training converged to finite losses, and what is served
        equals what was trained bit for bit.

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
    with _progress(console, options.steps) as on_step:
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
        with console.status(f"converting, saving and serving {name}"):
            artifact.save(
                folder,
                trained.model,
                artifact.serving_variables(trained.model, trained.variables),
            )
            served = serving.serve_in_fresh_process(
                folder,
                tokens=tokens,
                trained_logits=serving.forward(
                    trained.model, trained.variables, tokens
                ),
                prompt=prompt,
                new_tokens=options.generated_tokens,
                seed=options.seed,
            )
        found[name] = report.figures(trained, artifact.checkpoint_bytes(folder), served)
        samples[name] = np.array(served.sample)

    console.print(report.sample("prompt, from the held-out text", prompt))
    for name, sample in samples.items():
        console.print(report.sample(f"{name}, served, goes on", sample))
    console.print(report.table(found))
    _write_files(console, options, runs, found)
    problems = report.failures(found)
    for line in problems:
        _say(console, line, style="bold red")
    return not problems


def build_models(options: Options) -> dict[str, Transformer]:
    """The two models that are compared: they differ in their `cfg` alone."""
    sizes = {name: getattr(options, name) for name in artifact.SIZES}
    cfg = config.fully_quantized(fwd_bits=options.fwd_bits, bwd_bits=options.bwd_bits)
    return {
        "float32": Transformer(**sizes),
        options.quantized_name: Transformer(**sizes, cfg=cfg),
    }


def _say(console: rich.console.Console, line: str, style: str | None = None) -> None:
    """Prints a line as it is, also where it is wider than the console."""
    console.print(line, style=style, soft_wrap=True)


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
    _say(
        console,
        f"{text.name}: {len(text.training) / 1e6:.2f} MB to train on, "
        f"{len(text.validation) / 1e6:.2f} MB held out",
    )
    _say(
        console,
        f"{' and '.join(models)}: {options.layers} layers of width {options.width}, "
        f"{weights / 1e6:.2f} million weights; {options.steps} steps of "
        f"{options.batch} x {options.length} bytes",
    )


@contextlib.contextmanager
def _progress(
    console: rich.console.Console, steps: int
) -> Iterator[Callable[[int, Mapping[str, training.Trained]], None]]:
    """Shows training's progress: a bar on a terminal, plain lines elsewhere."""
    start = time.perf_counter()

    def losses(runs: Mapping[str, training.Trained]) -> str:
        return ", ".join(f"{name} {run.losses[-1]:.3f}" for name, run in runs.items())

    if not console.is_terminal:
        marks = {round(steps * i / PLAIN_LINES) for i in range(1, PLAIN_LINES + 1)}

        def print_line(step, runs):
            if step in marks:
                _say(
                    console,
                    f"step {step} of {steps}: training loss {losses(runs)} "
                    f"({time.perf_counter() - start:.0f} s)",
                )

        yield print_line
        return

    with rich.progress.Progress(
        rich.progress.TextColumn("training"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TextColumn("{task.fields[losses]}"),
        rich.progress.TimeRemainingColumn(),
        console=console,
    ) as progress:
        task = progress.add_task("training", total=steps, losses="compiling")
        yield lambda step, runs: progress.update(
            task, completed=step, losses=losses(runs)
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
        _say(console, f"loss curves: {curves}")
    else:
        _say(console, "no loss curves: pip install 'aqtlite[demo]' to have them drawn")
    _say(console, f"checkpoints and figures: {options.out}")
