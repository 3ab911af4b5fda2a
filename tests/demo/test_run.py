"""The whole demo, at a tiny size."""

import json

import pytest

from aqtlite import cli
from aqtlite.demo import serving
from aqtlite.demo.errors import ServingError

TINY = ["demo", "--smoke", "--steps=12", "--layers=1", "--width=32", "--heads=2"]
TINY += ["--batch=2", "--length=32", "--new-tokens=8"]


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
    assert (
        models["int8"]["checkpoint_bytes"] < 0.8 * models["float32"]["checkpoint_bytes"]
    )
    assert not (tmp_path / "float32" / "config.json").exists()
    assert (tmp_path / "int8" / "config.json").exists()


def test_demo_fails_where_served_differs_from_trained(tmp_path, capsys, monkeypatch):
    served = serving.Served(
        bit_exact=False, largest_difference=0.5, seconds_per_token=1.0, sample=[65]
    )
    monkeypatch.setattr(serving, "serve_in_fresh_process", lambda *a, **k: served)
    assert cli.main([*TINY, "--steps=1", "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "NO" in shown
    assert "what is served is NOT what was trained" in shown


def test_4_bits_forward(tmp_path, capsys):
    argv = [*TINY, "--steps=2", "--fwd-bits=4", "--out", str(tmp_path)]
    assert cli.main(argv) == 0
    assert "int4-int8" in capsys.readouterr().out


def test_a_failed_serving_process_is_reported(tmp_path):
    with pytest.raises(ServingError, match=r"model\.json"):
        serving.serve_in_fresh_process(
            tmp_path,
            tokens=[[0]],
            trained_logits=[0.0],
            prompt=[0],
            new_tokens=1,
            seed=0,
        )
