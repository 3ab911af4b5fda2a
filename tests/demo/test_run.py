"""The whole demo, at a tiny size."""

import argparse
import contextlib
import dataclasses
import io
import json

import jax
import numpy as np
import pytest

from aqtlite.__main__ import main
from aqtlite_demo import corpus, run, serving, snapshot, training
from aqtlite_demo import options as options_lib
from aqtlite_demo.errors import ServingError
from aqtlite_demo.options import Options

pytestmark = [pytest.mark.slow, pytest.mark.code("quick")]

STEPS = 20
TINY = ["demo", "--smoke", f"--steps={STEPS}", "--layers=1", "--width=32", "--heads=2"]
TINY += ["--batch=4", "--length=8", "--new-tokens=4", "--lr=0.01"]


def _text(folder):
    text = folder / "text"
    text.write_bytes(b"to be or not to be " * 200)
    return text


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Its status, result and folder, the steps that it was told of and its models."""
    folder = tmp_path_factory.mktemp("demo")
    text = _text(folder)
    seen, found = [], {}

    def train(*args, on_step, **kwargs):
        def tell(step, runs):
            seen.append(step)
            on_step(step, runs)

        found.update(train_side_by_side(*args, on_step=tell, **kwargs))
        return found

    train_side_by_side = training.train_side_by_side
    shown, said = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(said),
    ):
        patch.setattr(training, "train_side_by_side", train)
        out = folder / "out"
        status = main([*TINY, "--text", str(text), "--out", str(out)])
    shown = shown.getvalue(), said.getvalue()
    return status, shown, out, seen, found


def _untrained(models, batches, validation, **options):
    """Stands in for the training, which is tested by itself."""
    init = {
        n: jax.jit(m.init)(jax.random.key(0), validation[0][:, :-1])
        for n, m in models.items()
    }
    return {
        name: training.Trained(
            model, init[name], losses=[5.5], curve=[(1, 5.5)], seconds=[1.0]
        )
        for name, model in models.items()
    }


def test_demo_serves_what_it_trained(demo):
    status, (shown, said), out, _, _ = demo
    assert status == 0
    assert f"step {STEPS} of {STEPS}" in said
    assert "compiling the training steps of float32 and int8" in said
    assert "int8 ended 0." in shown and "bit for bit." in shown
    assert shown.endswith(f"aqtlite show {out}/int8/checkpoint\n")
    assert "served equals trained, bit for bit" in shown
    assert "NO" not in shown
    models = json.loads((out / "figures.json").read_text())["models"]
    assert list(models) == ["float32", "int8"]
    assert all(model["bit_exact"] for model in models.values())
    assert all(model["validation_loss"] < 6 for model in models.values())
    # At this size most of either checkpoint is Orbax's metadata.
    assert models["int8"]["checkpoint_bytes"] < models["float32"]["checkpoint_bytes"]
    assert not (out / "float32" / "config.json").exists()
    assert (out / "int8" / "config.json").exists()


def test_models_learn_from_the_same_batches(demo):
    *_, seen, runs = demo
    assert seen == list(range(1, STEPS + 1))
    # The same initial weights and batch; then quantization takes its own path.
    assert abs(runs["float32"].losses[0] - runs["int8"].losses[0]) < 0.02
    for one in runs.values():
        assert len(one.losses) == len(one.seconds) == STEPS
        assert [step for step, _ in one.curve] == [3, 7, 10, 13, 17, STEPS]
        assert one.validation_loss == one.curve[-1][1]
        assert one.validation_loss < one.losses[0] - 1
    difference = runs["float32"].validation_loss - runs["int8"].validation_loss
    assert 0 < abs(difference) < 0.1


def test_demo_fails_where_served_differs_from_trained(tmp_path, capsys, monkeypatch):
    served = serving.Served(
        bit_exact=False, largest_difference=0.5, seconds_per_token=1.0, sample=[65]
    )
    monkeypatch.setattr(serving, "serve_in_fresh_process", lambda *a, **k: served)
    monkeypatch.setattr(training, "train_side_by_side", _untrained)
    assert main([*TINY, "--steps=1", "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert "NO" in shown.out and "Next" not in shown.out
    assert "what is served is NOT what was trained" in shown.err


def test_an_interrupted_demo_goes_on(demo, tmp_path, capsys, monkeypatch):
    *_, trained = demo
    served = serving.Served(
        bit_exact=True, largest_difference=0.0, seconds_per_token=1.0, sample=[65]
    )
    monkeypatch.setattr(serving, "serve_in_fresh_process", lambda *a, **k: served)
    monkeypatch.setattr(snapshot, "EVERY_SECONDS", 0.0)
    found, seen = {}, []

    def train(*args, on_step, **kwargs):
        def tell(step, runs):
            seen.append(step)
            if seen == [*range(1, 8)]:
                raise KeyboardInterrupt

        found.update(train_side_by_side(*args, on_step=tell, **kwargs))
        return found

    train_side_by_side = training.train_side_by_side
    monkeypatch.setattr(training, "train_side_by_side", train)
    out = tmp_path / "out"
    argv = [*TINY, "--text", str(_text(tmp_path)), "--out", str(out), "--json"]
    assert main(argv) == 130
    assert "The same command goes on after step 7\n" in capsys.readouterr().err
    assert main([*argv, "--cache", "float32"]) == 0
    shown = capsys.readouterr()
    assert "goes on after step 7; --overwrite starts anew" in shown.err
    assert json.loads(shown.out) == json.loads((out / "figures.json").read_text())
    assert seen == [*range(1, STEPS + 1)]
    for name, one in trained.items():
        assert found[name].losses == one.losses
        assert found[name].curve == one.curve
        assert len(found[name].seconds) == STEPS
    assert not list(out.glob("training*"))


@pytest.mark.parametrize("other", [["--lr", "0.02"], ["--overwrite"]])
def test_another_demo_starts_anew(other, tmp_path):
    def options(argv):
        parser = argparse.ArgumentParser()
        options_lib.add_arguments(parser)
        return options_lib.from_arguments(parser.parse_args(argv))

    argv = ["--out", str(tmp_path), "--length", "8"]
    text, _ = corpus.load(_text(tmp_path), 8)
    empty = snapshot.FileSnapshot(options(argv), text)
    empty.keep(3, {}, {}, is_last=True)
    assert snapshot.FileSnapshot(options(argv), text).step == 3
    assert snapshot.FileSnapshot(options([*argv, *other]), text).step == 0
    shorter = dataclasses.replace(text, training=text.training[:-1])
    assert snapshot.FileSnapshot(options(argv), shorter).step == 0


def test_models_differ_in_their_config_alone():
    models = run.build_models(Options(fwd_bits=4))
    assert list(models) == ["float32", "int4-int8"]
    assert models["float32"].cfg is None
    assert models["int4-int8"].clone(cfg=None) == models["float32"]


def test_a_failed_serving_process_is_reported(tmp_path):
    with pytest.raises(ServingError, match=r"FileNotFoundError: .*model\.json"):
        serving.serve_in_fresh_process(
            tmp_path,
            tokens=np.zeros((1, 1), np.int32),
            trained_logits=np.zeros(1),
            prompt=np.zeros(1, np.int32),
            new_tokens=2,
            seed=0,
        )
