"""The whole demo, at a tiny size."""

import json

import jax
import numpy as np
import pytest

from aqtlite import cli
from aqtlite.demo import run, serving, training
from aqtlite.demo.errors import ServingError
from aqtlite.demo.options import Options

TINY = ["demo", "--smoke", "--steps=12", "--layers=1", "--width=32", "--heads=2"]
TINY += ["--batch=2", "--length=32", "--new-tokens=8"]


def _untrained(models, batches, validation, **options):
    """Stands in for the training, which is tested by itself."""
    init = {
        n: jax.jit(m.init)(jax.random.key(0), validation[0]) for n, m in models.items()
    }
    return {
        name: training.Trained(
            model, init[name], 5.5, losses=[5.5], curve=[(1, 5.5)], seconds=[1.0]
        )
        for name, model in models.items()
    }


def test_demo_serves_what_it_trained(tmp_path, capsys):
    assert cli.main([*TINY, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "step 12 of 12" in shown
    assert "served equals trained, bit for bit" in shown
    assert "NO" not in shown
    models = json.loads((tmp_path / "figures.json").read_text())["models"]
    assert list(models) == ["float32", "int8"]
    assert all(model["bit_exact"] for model in models.values())
    assert all(model["validation_loss"] < 6 for model in models.values())
    # At this size most of either checkpoint is Orbax's metadata.
    assert models["int8"]["checkpoint_bytes"] < models["float32"]["checkpoint_bytes"]
    assert not (tmp_path / "float32" / "config.json").exists()
    assert (tmp_path / "int8" / "config.json").exists()


def test_demo_fails_where_served_differs_from_trained(tmp_path, capsys, monkeypatch):
    served = serving.Served(
        bit_exact=False, largest_difference=0.5, seconds_per_token=1.0, sample=[65]
    )
    monkeypatch.setattr(serving, "serve_in_fresh_process", lambda *a, **k: served)
    monkeypatch.setattr(training, "train_side_by_side", _untrained)
    assert cli.main([*TINY, "--steps=1", "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "NO" in shown
    assert "what is served is NOT what was trained" in shown


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
