"""Train a transformer with every preset, and compare the validation losses.

    python -m benchmarks.quality [--presets NAME ...] [--seeds N ...] [--quick]

Finished runs are kept in a file, one line of JSON each: an interrupted command resumes,
and a preset with a changed config is trained again. Needs the `test` extra, which
installs the peers. benchmarks/quality/tables.md explains the figures.
"""

import argparse
import dataclasses
import importlib.metadata
import pathlib
from collections.abc import Sequence

from aqtlite_demo import corpus as corpus_lib
from benchmarks.harness import arguments as arguments_lib
from benchmarks.harness import pages, tables
from benchmarks.quality import (
    plot,
    presets,
    progress,
    records,
    report,
    summary,
    training,
)


def parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    defaults = training.Options()
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.quality",
        description=__doc__.splitlines()[0],
    )
    result.add_argument(
        "--presets",
        nargs="+",
        metavar="NAME",
        choices=presets.NAMES,
        default=list(presets.NAMES),
        help=f"of {', '.join(presets.NAMES)}; in this order",
    )
    result.add_argument(
        "--seeds",
        nargs="+",
        type=arguments_lib.natural,
        metavar="N",
        default=[0, 1, 2],
        help="each is trained with every preset before the next (default: 0 1 2)",
    )
    for name in ("steps", "batch", "layers", "width"):
        result.add_argument(
            f"--{name}",
            type=arguments_lib.positive,
            metavar="N",
            help=f"(default: {getattr(defaults, name)})",
        )
    result.add_argument("--lr", type=float, help=f"(default: {defaults.lr})")
    result.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes, for a check that everything runs",
    )
    result.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="FILE.jsonl",
        default=pathlib.Path("quality.jsonl"),
        help="the file of finished runs (default: %(default)s)",
    )
    result.add_argument(
        "--report", action="store_true", help="train nothing, report what FILE has"
    )
    result.add_argument("--plot", type=pathlib.Path, metavar="FILE.png")
    result.add_argument(
        "--page",
        type=pathlib.Path,
        metavar="FILE.md",
        help="write the table between the markers of a page such as tables.md",
    )
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Train missing runs, print the table, and write the plot and the page."""
    command = parser()
    asked = command.parse_args(arguments)
    given = {
        field.name: value
        for field in dataclasses.fields(training.Options)
        if (value := getattr(asked, field.name, None)) is not None
    }
    options = dataclasses.replace(
        training.QUICK if asked.quick else training.Options(), **given
    )
    corpus = corpus_lib.standard_library(options.length)
    names = list(dict.fromkeys(asked.presets))
    chosen = [presets.select(name) for name in names]
    hashes = {p.name: records.run_hash(p, options, corpus) for p in chosen}
    console = tables.console()
    try:
        found = records.read(asked.out)
        if not asked.report:
            done = {(record.hash, record.seed) for record in found}
            missing = [
                (preset, seed)
                for seed in dict.fromkeys(asked.seeds)
                for preset in chosen
                if (hashes[preset.name], seed) not in done
            ]
            with progress.shown(console, len(missing), options.steps) as begin:
                for preset, seed in missing:
                    on_step = begin(f"{preset.name}, seed {seed}")
                    result = training.train(preset, options, corpus, seed, on_step)
                    record = records.Record(
                        preset.name, seed, hashes[preset.name], result
                    )
                    records.append(asked.out, record, preset, options)
            found = records.read(asked.out)
        float32 = presets.select(presets.FLOAT32)
        baseline = records.run_hash(float32, options, corpus)
        summaries = _summaries(hashes, baseline, found)
        if not summaries:
            command.error(f"{asked.out} has no run of these presets and options")
        console.print(report.table(summaries, markdown=not console.is_terminal))
        if asked.plot:
            plot.draw(plot.of_summaries(summaries), asked.plot)
        if asked.page:
            text = report.page_text(summaries, options, _versions())
            report.write_page(asked.page, options, text)
    except (records.RecordsError, pages.PageError) as error:
        command.error(str(error))


def _summaries(
    hashes: dict[str, str], baseline: str, found: Sequence[records.Record]
) -> list[summary.Summary]:
    """Summaries of the presets that have runs with the current config and options."""
    by_run = {(record.hash, record.seed): record for record in found}
    by_hash: dict[str, list[records.Record]] = {}
    for (run_hash, _), record in sorted(by_run.items()):
        by_hash.setdefault(run_hash, []).append(record)
    return [
        summary.summarize(name, by_hash[run_hash], by_hash.get(baseline, []))
        for name, run_hash in hashes.items()
        if run_hash in by_hash
    ]


def _versions() -> str:
    packages = ("jax", "flax", "aqtp", "qwix")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)


if __name__ == "__main__":
    main()
