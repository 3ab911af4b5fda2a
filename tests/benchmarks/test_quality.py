"""Training with every preset: runs are kept, resumed and compared."""

import dataclasses
import io
import json
import math
import os
import pathlib
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

from aqtlite_demo import corpus as corpus_lib
from benchmarks.harness import pages
from benchmarks.quality import __main__ as command
from benchmarks.quality import (
    plot,
    presets,
    progress,
    records,
    report,
    summary,
    training,
)
from benchmarks.quality.records import Record
from tests.common import QUICK_FLAGS

pytestmark = [pytest.mark.slow, pytest.mark.code("quick")]

STEPS = 2
TRAINED = ("float32", "static_int8", "qwix_int8")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A quick run of some presets, as a user runs it: its folder."""
    folder = tmp_path_factory.mktemp("quality")
    begin, end = report.markers(training.QUICK)
    (folder / "page.md").write_text(f"# Page\n\n{begin}\n{end}\n\nEnd\n")
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.quality", *arguments(folder, *TRAINED)],
        cwd=pathlib.Path(__file__).parents[2],
        # Most of the time is compilation.
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_FLAGS},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert f"float32, seed 0: step {STEPS} of {STEPS}, loss " in process.stdout
    return folder


def arguments(folder, *names):
    files = {"--out": "runs.jsonl", "--plot": "plot.png", "--page": "page.md"}
    named = [text for k, v in files.items() for text in (k, str(folder / v))]
    fixed = ["--quick", "--steps", str(STEPS), "--seeds", "0"]
    return [*fixed, *named, "--presets", *names]


def run(folder, *names, report=False):
    command.main([*arguments(folder, *names), *["--report"] * report])


def result(*losses):
    return training.Result(list(losses), training_loss=1.0, step_seconds=0.1)


def test_presets_have_names_and_identities_of_their_own():
    chosen = [presets.select(name) for name in presets.NAMES]
    assert [preset.name for preset in chosen] == list(presets.NAMES)
    assert len({preset.identity for preset in chosen}) == len(chosen) > 20


def test_each_run_is_a_line(quick):
    lines = [json.loads(x) for x in (quick / "runs.jsonl").read_text().splitlines()]
    assert [line["preset"] for line in lines] == list(TRAINED)
    for line in lines:
        assert line["seed"] == 0
        assert line["options"]["steps"] == STEPS
        assert line["versions"]["jax"] == jax.__version__
        assert len(line["validation_losses"]) == training.QUICK.validation_batches
        assert line["validation_loss"] == pytest.approx(
            np.mean(line["validation_losses"])
        )
        # The same weights and data: one or two steps keep them close, not equal.
        assert abs(line["validation_loss"] - lines[0]["validation_loss"]) < 0.02
    assert len({line["validation_loss"] for line in lines}) == len(lines)
    assert "calibration" in json.dumps(lines[1]["config"])


def test_page_and_plot(quick):
    page = (quick / "page.md").read_text()
    assert page.startswith("# Page\n") and page.endswith("\n\nEnd\n")
    for name in TRAINED:
        assert f"| {name} | 1 | " in page
    assert f"{STEPS} steps of 4 x 16 bytes at learning rate 0.003" in page
    picture = (quick / "plot.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    shown = plot.of_page(quick / "page.md", training.QUICK)
    assert list(shown) == list(TRAINED[1:])
    assert plot.digest(shown).encode() in picture


def test_the_picture_of_the_page_is_of_its_table():
    root = pathlib.Path(__file__).parents[2]
    page = root / "benchmarks/quality/tables.md"
    options = dataclasses.replace(training.Options(), layers=2, width=64)
    shown = plot.of_page(page, options)
    assert shown["int8"].lowest > 0 and len(shown) > 30
    assert plot.digest(shown).encode() in (root / "docs/quality.png").read_bytes(), (
        "draw it again: python -m benchmarks.quality.plot "
        "benchmarks/quality/tables.md docs/quality.png --layers 2 --width 64"
    )


def test_a_page_without_the_table(tmp_path, capsys):
    (tmp_path / "page.md").write_text("no markers")
    with pytest.raises(SystemExit):
        plot.main([str(tmp_path / "page.md"), str(tmp_path / "plot.png")])
    assert "needs the lines <!-- 4 layers" in capsys.readouterr().err


def test_finished_runs_are_not_run_again(quick, monkeypatch, capsys):
    trained = []
    monkeypatch.setattr(
        training,
        "train",
        lambda preset, *_: trained.append(preset.name) or result(4.0, 5.0),
    )
    path = quick / "runs.jsonl"
    before = path.read_text()
    path.write_text(before + '{"preset": "int8", "se')  # of a killed process
    run(quick, "int8", *TRAINED)
    assert trained == ["int8"]
    run(quick, "int8", *TRAINED)
    assert trained == ["int8"]
    run(quick, "int8", report=True)
    shown = capsys.readouterr().out
    assert "4.5000" in shown
    float32 = next(r for r in records.read(path) if r.preset == "float32")
    difference = 4.5 - np.mean(float32.result.validation_losses)
    assert f"{difference:+.4f}" in shown
    monkeypatch.setitem(presets.CONFIGS, "int8", presets.CONFIGS["int4"])
    run(quick, "int8")
    assert trained == ["int8", "int8"]
    assert path.read_text().startswith(before)
    assert len(records.read(path)) == len(TRAINED) + 2
    path.write_text(before)


def test_what_cannot_be_read_or_written_is_said(tmp_path, capsys):
    (tmp_path / "runs.jsonl").write_text('{"preset": "int8"}\n')
    (tmp_path / "page.md").write_text("no markers")
    with pytest.raises(SystemExit):
        run(tmp_path, "int8", report=True)
    assert "runs.jsonl, line 1 is not a run" in capsys.readouterr().err
    (tmp_path / "runs.jsonl").write_text("")
    with pytest.raises(SystemExit):
        run(tmp_path, "int8", report=True)
    assert "has no run of these presets" in capsys.readouterr().err
    message = r"needs the lines <!-- 4 layers of width 192: begin -->"
    with pytest.raises(pages.PageError, match=message):
        report.write_page(tmp_path / "page.md", training.Options(), "text")


def test_bars_of_all_runs_and_of_the_present_one():
    file = io.StringIO()
    console = rich.console.Console(file=file, force_terminal=True, width=100)
    with progress.shown(console, runs=2, steps=3) as begin:
        for what in ("int8, seed 0", "int4, seed 0"):
            on_step = begin(what)
            for step in (1, 2, 3):
                on_step(step, 2.5)
    shown = file.getvalue()
    assert "6/6" in shown and "3/3" in shown
    assert "int4, seed 0" in shown and "loss 2.500" in shown


def test_differences_are_those_of_the_same_seed():
    base = [Record("float32", seed, "x", result(1 + seed, 3 + seed)) for seed in (0, 1)]
    runs = [
        Record("int8", 1, "y", result(2.1, 4.3)),
        Record("int8", 0, "y", result(1.1, 3.1)),
        Record("int8", 7, "y", result(9.0, 9.0)),
    ]
    found = summary.summarize("int8", runs, base)
    assert found.seeds == 3
    assert found.differences == pytest.approx([0.2, 0.1])
    assert found.difference.mean == pytest.approx(0.15)
    assert found.difference.standard_error == pytest.approx(0.05)
    assert (found.difference.lowest, found.difference.highest) == pytest.approx(
        (0.1, 0.2)
    )
    # By batch, the mean over seeds is 0.1 and 0.2.
    assert found.validation_error == pytest.approx(0.05)
    assert found.loss.mean == pytest.approx((3.2 + 2.1 + 9.0) / 3)
    alone = summary.summarize("int8", runs[2:], base)
    assert alone.difference is None
    assert math.isnan(alone.loss.standard_error)


def test_a_collection_with_gradients_becomes_them():
    options = training.QUICK
    corpus = corpus_lib.standard_library(options.length)
    preset = presets.select("float32")
    step, _ = training.programs(preset, options)
    variables, opt_state = training.initial(preset, options, corpus, seed=0)
    variables = {**variables, training.OVERWRITTEN: {"history": np.ones(3)}}
    before = jax.tree.map(np.asarray, variables)
    batch = next(corpus.batches(options.batch, options.length, 0))
    after, _, _ = step(variables, opt_state, batch, jax.random.key(0))
    assert set(after) == {"params", training.OVERWRITTEN}
    # The loss does not depend on it.
    np.testing.assert_array_equal(after[training.OVERWRITTEN]["history"], np.zeros(3))
    kernel = before["params"]["logits"]["kernel"]
    assert (kernel == after["params"]["logits"]["kernel"]).all()  # the warmup's rate


@pytest.mark.parametrize("name", ["aqtp_int8", "qwix_int8"])
def test_peers_start_from_the_same_weights(name):
    """The module of aqtp adds no parameters, and changes no initial ones."""
    key, x = jax.random.key(3), jnp.ones((2, 4))
    plain, theirs = (
        jax.jit(nn.Dense(3, dot_general=presets.select(one).dot_general(key)).init)(
            key, x
        )
        for one in ("float32", name)
    )
    jax.tree.map(np.testing.assert_array_equal, plain, theirs)
