"""``aqtlite choose``, as a user runs it, and commands that take its rules."""

import json
import sys

import numpy as np
import pytest

from aqtlite import cli, config, rules
from tests.checkpoint.support import save
from tests.common import normal
from tests.flax.nnx import models as nnx_models
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

FACTORY = """
import jax, jax.numpy as jnp
from flax import linen as nn, nnx
from aqtlite import config
from aqtlite.flax import AqtDotGeneral, quantize_model
from tests.flax.nnx import models as nnx_models

X = jax.ShapeDtypeStruct((2, 8), "float32")

class Net(nn.Module):
    cfg: object = None

    @nn.compact
    def __call__(self, x, scale=1.0):
        dot_general = AqtDotGeneral(self.cfg)
        x = nn.relu(nn.Dense(16, dot_general=dot_general, name="up")(x))
        return scale * nn.Dense(4, dot_general=dot_general, name="down")(x)

def factory(cfg=None):
    return Net(cfg), (X,), {"scale": 2.0}

def of_nnx():
    model = nnx.eval_shape(lambda: nnx_models.Mlp(nnx.Rngs(0)))
    return model, (X,)

def injected():
    return Net(config.weight_only(4)), (X,)

def loss(outputs, x, labels):
    return jnp.mean((outputs.argmax(-1) != labels).astype("float32"))

def unreduced(outputs, x, labels):
    return outputs

def without_inputs(outputs, labels):
    return jnp.mean(outputs)
"""

CANDIDATES = ["--candidates", "weight_only=4", "fully_quantized"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a module, checkpoints and data."""
    folder = tmp_path_factory.mktemp("choose")
    (folder / "chosen_models.py").write_text(FACTORY)
    sys.path.insert(0, str(folder))
    import chosen_models

    x = np.asarray(normal((10, 8)))
    save(folder / "float", init(chosen_models.Net(), x), "msgpack")
    model = nnx_models.Mlp(nnx_models.nnx.Rngs(0))
    save(folder / "nnx", nnx_models.values(model), "msgpack")
    np.savez(folder / "data.npz", x)
    np.savez(folder / "labelled.npz", x, np.arange(10) % 4)
    yield folder
    sys.path.remove(str(folder))
    del sys.modules["chosen_models"]


@pytest.fixture
def choose(made, capsys):
    def run(*options, factory="factory", source="float.msgpack", data="data.npz"):
        argv = ["choose", str(made / source), "--calibrate", str(made / data)]
        argv += ["--model", f"{made / 'chosen_models.py'}:{factory}", *options]
        code = cli.main([str(one) for one in argv])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def test_it_writes_rules_that_other_commands_take(made, choose, tmp_path, capsys):
    out, plot = tmp_path / "rules.json", tmp_path / "bits.png"
    options = [*CANDIDATES, "--budget", "480B", "--out", out, "--plot", plot]
    code, text, _ = choose(*options, "--batch-size", "5")
    assert code == 0
    assert "bytes of at most 480 bytes; 2 weights" in text
    assert plot.stat().st_size > 1000
    found = rules.from_json(out.read_text())
    assert [rule.path for rule in found] == ["Net/up", "Net/down"]
    model = ["--model", f"{made / 'chosen_models.py'}:factory", "--rules", str(out)]
    assert cli.main(["plan", *model, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    planned = [config.from_json(json.dumps(row["cfg"])) for row in rows]
    assert planned == [rule.cfg or config.unquantized() for rule in found]
    target = str(tmp_path / "serving")
    source, data = str(made / "float.msgpack"), str(made / "data.npz")
    assert cli.main(["convert", source, target, *model]) == 0
    capsys.readouterr()
    target, needless = str(tmp_path / "again"), ["--calibrate", data]
    assert cli.main(["convert", source, target, *model, *needless]) == 0
    assert "needs no statistics: --calibrate was not needed" in capsys.readouterr().err


@pytest.mark.slow
def test_candidates_with_statistics_are_measured_and_converted(
    made, choose, tmp_path, capsys
):
    out, target = tmp_path / "rules.json", tmp_path / "serving"
    names = ["--candidates", "gptq=3", "gptq=8"]
    code, text, _ = choose(*names, "--budget", "480B", "--out", out, "--json")
    data = json.loads(text)
    assert code == 0
    assert {one["candidate"] for one in data["choices"]} & {"gptq=3", "gptq=8"}
    argv = ["--model", f"{made / 'chosen_models.py'}:factory", "--rules", str(out)]
    argv += ["--calibrate", str(made / "data.npz"), "--json"]
    source = str(made / "float.msgpack")
    assert cli.main(["convert", source, str(target), *argv]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes_after"] == data["chosen"]["nbytes"]


def test_json_and_a_part_of_the_size(choose):
    code, out, _ = choose(*CANDIDATES, "--budget", "0.5", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["budget"] == data["uniform"][0]["nbytes"] // 2
    names = [one["name"] for one in data["uniform"]]
    assert names == ["float", "weight_only=4", "fully_quantized"]


def test_a_budget_of_time(choose):
    code, out, _ = choose(*CANDIDATES, "--budget", "2s", "--json")
    data = json.loads(out)
    assert code == 0
    assert (data["budget"], data["unit"]) == (2.0, "seconds")
    assert 0 < data["chosen"]["seconds"] < 2
    assert {one["candidate"] for one in data["choices"]} == {"float"}


def test_a_loss_takes_the_arrays_behind_those_of_the_model(made, choose):
    place = f"{made / 'chosen_models.py'}:loss"
    options = [*CANDIDATES, "--budget", "0.4", "--json", "--batch-size", "4"]
    code, out, err = choose(*options, "--loss", place, data="labelled.npz")
    data = json.loads(out)
    assert code == 0
    assert 0 <= data["chosen"]["loss"] <= 1
    assert data["batches"] == 2
    assert "the last 2 of 10 examples are left out" in err
    code, _, err = choose(*options, data="labelled.npz")
    assert code == 2
    assert "holds 2 arrays (arr_0, arr_1), and the model takes 1" in err


def test_a_loss_takes_the_arrays_of_the_model_too(made, choose):
    place = f"{made / 'chosen_models.py'}:without_inputs"
    options = [*CANDIDATES, "--budget", "0.4", "--loss", place]
    code, _, err = choose(*options, data="labelled.npz")
    assert code == 2
    assert "loss is called with the outputs of the model and all items" in err


def test_a_full_disk_costs_neither_the_result_nor_the_earlier_rules(
    choose, tmp_path, full_disk
):
    files = [tmp_path / "rules.json", tmp_path / "bits.png"]
    for option, path in zip(["--out", "--plot"], files, strict=True):
        path.write_text("before")
        options = [*CANDIDATES, "--budget", "480B", "--json", "--overwrite"]
        code, out, err = choose(*options, option, path)
        assert code == 2
        assert json.loads(out)["budget"] == 480
        why = "cannot be written: No space left on device"
        assert err == f"aqtlite choose: error: {path} {why}\n"
        assert path.read_text() == "before"
    assert sorted(tmp_path.iterdir()) == sorted(files)


def test_nnx_models_and_configs_of_files(choose, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(config.to_json(config.weight_only(3)))
    options = ["--config", path, "--budget", "0.9", "--json"]
    code, out, _ = choose(*options, factory="of_nnx", source="nnx.msgpack")
    data = json.loads(out)
    assert code == 0
    assert [one["name"] for one in data["uniform"]] == ["float", "mine"]
    assert [one["paths"] for one in data["choices"]] == [["up"], ["down"]]


def test_mistakes_are_one_line(made, choose, tmp_path):
    module = made / "chosen_models.py"
    rest = [*CANDIDATES, "--budget", "0.5"]

    def error(*options, **kwargs):
        code, _, err = choose(*options, **kwargs)
        assert code == 2
        (line,) = err.splitlines()
        return line.removeprefix("aqtlite choose: error: ")

    assert error("--budget", "0.5").startswith("there is nothing to choose from")
    assert "the budget of 10 bytes is too small" in error(*CANDIDATES, "--budget", "10")
    assert "has no 'lss'; did you mean" in error(*rest, "--loss", f"{module}:lss")
    assert "must return a scalar float" in error(
        *rest, "--loss", f"{module}:unreduced", data="labelled.npz"
    )
    assert "were given configs in the model" in error(*rest, factory="injected")
    (tmp_path / "rules.json").touch()
    assert "'bits.txt' is no name of a plot" in error(
        *CANDIDATES, "--budget", "0.5", "--plot", "bits.txt"
    )
    wanted = "exists; --overwrite replaces it"
    assert wanted in error(*rest, "--out", tmp_path / "rules.json")
    names = ["a/mine.json", "b/mine.json"]
    for name in names:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(config.to_json(config.weight_only(4)))
    both = [x for name in names for x in ("--config", tmp_path / name)]
    assert "two candidates have one name" in error(*both, "--budget", "0.5")
    assert "no folder none" in error("--out", "none/rules.json", "--budget", "0.5")
    missing = error("--config", tmp_path / "none.json", "--budget", "0.5")
    assert "none.json does not exist" in missing


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--budget", "half"], "'half' is no size"),
        (["--budget", "5XB"], "'5XB' is no size"),
        (["--candidates", "lsq"], "no candidate 'lsq'"),
        (["--candidates", "weight_onl=4"], "did you mean 'weight_only=4'"),
    ],
)
def test_malformed_options(options, text, choose, capsys):
    with pytest.raises(SystemExit):
        choose(*options)
    assert text in capsys.readouterr().err


def test_rules_of_a_file_that_holds_none(made, tmp_path, capsys):
    path = tmp_path / "rules.json"
    path.write_text("[]")
    model = f"{made / 'chosen_models.py'}:factory"
    assert cli.main(["plan", "--model", model, "--rules", str(path)]) == 2
    assert "holds no rules" in capsys.readouterr().err
