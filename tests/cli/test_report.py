"""``aqtlite report``, as a user runs it."""

import json

import pytest

from aqtlite import cli

pytestmark = pytest.mark.code("quick")

FACTORY = """
import jax
from flax import linen as nn, nnx
from aqtlite.flax import AqtDotGeneral

X = jax.ShapeDtypeStruct((2, 4), "float32")

class Mlp(nn.Module):
    cfg: object = None

    @nn.compact
    def __call__(self, x, flip=False):
        assert flip
        return nn.Dense(8, dot_general=AqtDotGeneral(self.cfg), name="inside")(x)

def injected(cfg=None):
    return Mlp(cfg), (X,), {"flip": True}

def wide(cfg=None):
    return nn.Dense(256), (jax.ShapeDtypeStruct((256, 256), "float32"),)

def of_nnx():
    return nnx.eval_shape(lambda: nnx.Linear(4, 2, rngs=nnx.Rngs(0))), (X,)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reported")
    (folder / "reported.py").write_text(FACTORY)
    return folder


@pytest.fixture(autouse=True)
def folder(made, monkeypatch):
    monkeypatch.chdir(made)
    return made


def run(*args):
    return cli.main(["report", *args])


def test_table(capsys):
    assert run("reported.py:injected") == 0
    shown = capsys.readouterr().out
    assert "Mlp/inside" in shown and "100.0% in float32" in shown


def test_json_of_a_gradient_for_a_platform(capsys):
    options = ["--preset", "fully_quantized", "--backward", "--platform", "tpu"]
    assert run("reported.py:injected", *options, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["platform"] == "tpu"
    roles = [(x["role"], x["runs_in"]) for x in data["contractions"]]
    assert roles == [("forward", "int8"), ("gradient", "int8")]


def test_two_models(capsys):
    names = ["reported.py:of_nnx"] * 2
    assert run(*names, "--preset", "fully_quantized", "--backward") == 0
    assert "2 of 2 contractions differ" in capsys.readouterr().out


def test_times_of_contractions(capsys):
    assert run("reported.py:injected", "--backward", "--measure", "2", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    # So small a contraction is not in the profile, and has no time of its own.
    assert len(data["contractions"]) == 2 and "seconds" in data["contractions"][0]
    assert run("reported.py:wide", "--measure", "2") == 0
    assert " us" in capsys.readouterr().out
    assert run("reported.py:of_nnx", "--measure", "2") == 0
    assert run("reported.py:wide", "--measure", "2", "--platform", "tpu") == 2
    assert "give no --platform" in capsys.readouterr().err
    assert run("reported.py:wide", "--measure", "-1") == 2


def test_page(folder, capsys):
    assert run("reported.py:injected", "--html", "page.html") == 0
    assert "Mlp/inside" in (folder / "page.html").read_text()
    assert run("reported.py:injected", "--html", "page.html") == 2
    assert "page.html exists; --overwrite replaces it" in capsys.readouterr().err
    names = ["reported.py:injected"] * 2
    assert run(*names, "--html", "other.html") == 2
    assert "--html shows one report" in capsys.readouterr().err
    assert run(*names, names[0]) == 2
    assert "give one or two factories, not 3" in capsys.readouterr().err


def test_a_full_disk_costs_neither_the_result_nor_the_earlier_page(
    folder, capsys, full_disk
):
    (folder / "full.html").write_text("before")
    options = ["--html", "full.html", "--overwrite"]
    before = set(folder.iterdir())
    assert run("reported.py:injected", *options) == 2
    shown = capsys.readouterr()
    assert "Mlp/inside" in shown.out
    why = "full.html cannot be written: No space left on device"
    assert shown.err == f"aqtlite report: error: {why}\n"
    assert (folder / "full.html").read_text() == "before"
    assert set(folder.iterdir()) == before
