"""``aqtlite convert`` and ``aqtlite show``, as a user runs them."""

import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx

import aqtlite
from aqtlite import checkpoint, cli, config
from aqtlite.checkpoint import replacement
from aqtlite.flax import calibrate_in_float, convert, quantize_model
from aqtlite.flax import nnx as aqt_nnx
from tests.checkpoint.quantized_formats import edited
from tests.checkpoint.support import assert_same, save
from tests.flax import models
from tests.flax.nnx import models as nnx_models
from tests.flax.support import INT8, X, init

pytestmark = pytest.mark.code("quick")

VARIABLES = init(models.MlpBlock(INT8), X)
MODEL = ["float", "out", "--model", "serving_model:factory"]
FACTORY = """
import jax
from flax import linen as nn, nnx
from aqtlite import config
from aqtlite.flax import quantize_model as quantize_linen
from aqtlite.flax.nnx import quantize_model
from tests.flax import models
from tests.flax.nnx import models as nnx_models

def factory(cfg=config.fully_quantized()):
    return models.MlpBlock(cfg), (jax.ShapeDtypeStruct((4, 8), "float32"),)

def of_config(cfg):
    return factory(cfg)

def with_flag():
    return models.Trained(config.fully_quantized()), (
        jax.ShapeDtypeStruct((4, 8), "float32"),), {"train": False}

def by_rules():
    model, args = float_model()
    return quantize_linen(model, config.qat()), args

def float_model():
    return models.MlpBlock(None), (jax.ShapeDtypeStruct((4, 8), "float32"),)

def wrong():
    return models.MlpBlock(None)

def no_tuple():
    return models.MlpBlock(None), None

def raising():
    raise KeyError("mine")

def plain():
    return factory(None)

def exiting():
    raise SystemExit(3)

class Residual(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(8)(x)

def nnx_factory(cfg=config.fully_quantized()):
    make = lambda: quantize_model(nnx_models.Mlp(nnx.Rngs(0)), cfg)
    return nnx.eval_shape(make), (jax.ShapeDtypeStruct((4, 8), "float32"),)

def misshapen():
    return Residual(), (jax.ShapeDtypeStruct((4, 9), "float32"),)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a module and a checkpoint."""
    (tmp_path / "serving_model.py").write_text(FACTORY)
    (tmp_path / "exiting.py").write_text("import sys; sys.exit('not this way')")
    save(tmp_path / "float", VARIABLES, "orbax")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "serving_model", raising=False)
    return tmp_path


@pytest.fixture
def nnx_model(folder):
    """A checkpoint of an NNX model."""
    model = nnx_models.Mlp(nnx.Rngs(0))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "nnx", nnx.state(model))
    return model


def run(capsys, *argv):
    code = cli.main(["convert", *argv])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def error(capsys, *argv):
    code, _, err = run(capsys, *argv)
    assert code == 2
    assert err.startswith("aqtlite convert: error: ") and err.count("\n") == 1
    return err


def test_nnx_models(nnx_model, capsys):
    options = ["--model", "serving_model:nnx_factory", "--preset", "weight_only"]
    code, out, _ = run(capsys, "nnx", "out", *options, "--fwd-bits", "4")
    assert code == 0 and " s left" not in out
    assert "2 frozen, 2 kept" in out
    model = aqt_nnx.quantize_model(nnx_model, config.weight_only(4))
    served = [
        nnx_models.call(one, nnx_models.X)
        for one in (checkpoint.load_serving("out", model), aqt_nnx.convert(model, X))
    ]
    np.testing.assert_array_equal(*served)
    assert cli.main(["show", "out"]) == 0
    assert "down/kernel" in capsys.readouterr().out


def test_convert_and_show(folder, capsys):
    code, out, err = run(capsys, "float", "out", "--model", "serving_model:factory")
    assert code == 0
    assert " s left" in err and " s left" not in out
    assert "3 frozen, 3 kept" in out and "worst" in out
    wanted = convert(models.MlpBlock(INT8), VARIABLES, X)
    assert_same(checkpoint.load_serving("out"), wanted)
    assert cli.main(["show", "out"]) == 0
    shown = capsys.readouterr().out
    assert "Dense_2/kernel " in shown and "int8" in shown
    assert cli.main(["show", "out", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["weights"]) == 3 and data["kept"] == 3
    assert 40 < data["weights"][0]["decibels"] < 60


@pytest.mark.parametrize(
    "options, cfg",
    [
        (["--preset", "fully_quantized"], config.fully_quantized()),
        (["--preset", "weight_only", "--fwd-bits", "4"], config.weight_only(bits=4)),
        (["--preset", "nvfp4"], config.nvfp4()),
        (["--config", "cfg.json"], config.fully_quantized(fwd_bits=4)),
    ],
)
def test_configs(options, cfg, folder, capsys):
    (folder / "cfg.json").write_text(config.to_json(config.fully_quantized(fwd_bits=4)))
    argv = [*MODEL, *options]
    assert run(capsys, *argv)[0] == 0
    wanted = convert(models.MlpBlock(cfg), VARIABLES, X)
    assert_same(checkpoint.load_serving("out"), wanted)


def test_a_checkpoint_of_another_library(folder, capsys):
    """Its names are mapped, and its integers kept."""
    int8 = config.weight_only().fwd.rhs
    weights, floats = {}, nn.meta.unbox(VARIABLES)["params"]
    for i in range(3):
        layer = floats[f"Dense_{i}"]
        q = aqtlite.quantize(layer["kernel"].T, int8, axes=1)
        weights[f"mlp.{i}.weight"] = q
        weights[f"mlp.{i}.bias"] = np.asarray(layer["bias"])
    checkpoint.save_quantized("of_vllm", weights, format="compressed-tensors")
    err = error(capsys, "of_vllm", "out", *MODEL[2:])
    assert "is a quantized checkpoint of another library" in err
    moves = [
        checkpoint.Move(
            sources="mlp.{i}.weight", targets="params/Dense_{i}/kernel", axes=(1, 0)
        ),
        checkpoint.Move(sources="mlp.{i}.bias", targets="params/Dense_{i}/bias"),
    ]
    (folder / "map.json").write_text(checkpoint.moves_to_json(moves[:1]))
    argv = ["of_vllm", "out", *MODEL[2:], "--map", "map.json"]
    assert "no line of the map moves mlp.0.bias" in error(capsys, *argv)
    (folder / "map.json").write_text(checkpoint.moves_to_json(moves))
    code, out, err = run(capsys, *argv)
    assert code == 0 and "3 frozen, 3 kept" in out
    rows = [line.split()[-1] for line in out.splitlines() if line.startswith("Dense")]
    assert rows == ["kept"] * 3
    serving = checkpoint.load_serving("out")
    for i in range(3):
        q = serving["aqt"][f"Dense_{i}"]["kernel"]["rhs"].in_own_order().T
        given = weights[f"mlp.{i}.weight"]
        np.testing.assert_array_equal(q.qvalue, given.qvalue)
        np.testing.assert_array_equal(q.scale, given.scale)


def test_keep_float_dry_run_and_overwrite(folder, capsys):
    assert run(capsys, *MODEL)[0] == 0
    again = [*MODEL, "--overwrite"]
    _, out, _ = run(capsys, *again, "--keep-float", "*_1/*", "--dry-run")
    assert "2 frozen, 4 kept" in out
    assert checkpoint.summarize("out").kept == 3
    assert run(capsys, *again, "--keep-float", "*_1/*")[0] == 0
    assert checkpoint.summarize("out").kept == 4
    _, out, _ = run(capsys, "float", "out2", *MODEL[2:], "--dry-run")
    assert "3 frozen, 3 kept" in out and not (folder / "out2").exists()


def test_subtree(folder, capsys):
    save(folder / "state", {"params": VARIABLES["params"], "step": X}, "orbax")
    assert "--subtree params" in error(capsys, "state", "out", *MODEL[2:])
    assert run(capsys, "state", "out", *MODEL[2:], "--subtree", "params")[0] == 0
    wanted = convert(models.MlpBlock(INT8), VARIABLES, X)
    assert_same(checkpoint.load_serving("out"), wanted)


def test_each_collection_is_a_subtree(folder, capsys):
    save(folder / "trained", init(models.Trained(INT8), X), "orbax")
    argv = ["trained", "out", "--model", "serving_model:with_flag"]
    text = error(capsys, *argv, "--subtree", "params")
    both = ["--subtree", "params", "--subtree", "batch_stats"]
    assert " ".join(both) in text and "it holds params" in text
    assert run(capsys, *argv, *both)[0] == 0


def test_an_interruption_names_the_staging_folder(folder, capsys, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(replacement, "publish", interrupt)
    code, _, err = run(capsys, *MODEL)
    assert code == 130
    assert "interrupted. The weights that are done are in .out.converting: the" in err
    assert (folder / ".out.converting").exists()


@pytest.mark.parametrize(
    "argv, message",
    [
        (["nothing", "out", "--model", "serving_model:factory"], "does not exist"),
        (["float", "float", "--model", "serving_model:factory"], "contains the other"),
        (["float", "out", "--model", "serving_model:raising"], "KeyError: 'mine'"),
        ([*MODEL, "--fwd-bits", "4"], "goes with --preset"),
        (["float", "out", "--model", "serving_model:exiting"], "SystemExit: 3"),
        (["float", "out", "--model", "exiting:factory"], "SystemExit: not this way"),
        (
            ["float", "out", "--model", "serving_model:misshapen"],
            "tracing Residual with the sample inputs float32[4, 9] failed",
        ),
        ([*MODEL, "--subtree", "nothing"], "has no subtree 'nothing'; there are"),
        (["float", "x" * 300, "--model", "serving_model:factory"], "too long"),
        (["float", "out", "--model", "nowhere:factory"], "No module named 'nowhere'"),
        (
            ["float", "out", "--model", "serving_model:factery"],
            "has no 'factery'; did you mean 'factory'?",
        ),
        (["float", "out", "--model", "serving_model:jax"], "has to be a function"),
        (["float", "out", "--model", "serving_model:wrong"], "has to return"),
        (["float", "out", "--model", "serving_model:no_tuple"], "has to be a tuple"),
        (["float", "out", "--model", "serving_model:plain"], "needs --preset or"),
        (["float", "out", "--model", "serving_model:of_config"], "that nothing fills"),
        (["float", "out", "--model", "serving_model:with_flag"], "is missing"),
        (
            [
                "float",
                "out",
                "--model",
                "serving_model:by_rules",
                "--preset",
                "weight_only",
            ],
            "takes no config, and its model is quantized already",
        ),
        (
            [
                "float",
                "out",
                "--model",
                "serving_model:factory",
                "--preset",
                "weight_only",
                "--fwd-bits",
                "17",
            ],
            "from 1 to 16",
        ),
        (
            [
                "float",
                "out",
                "--model",
                "serving_model:factory",
                "--config",
                "none.json",
            ],
            "none.json does not exist",
        ),
        (
            [
                "float",
                "out",
                "--model",
                "serving_model:factory",
                "--config",
                "serving_model.py",
            ],
            "is no config",
        ),
        (
            [
                "float",
                "out",
                "--model",
                "serving_model:factory",
                "--keep-float",
                "nothing",
            ],
            "no weight matches 'nothing'",
        ),
    ],
)
def test_errors_are_one_line(argv, message, folder, capsys):
    assert message in error(capsys, *argv)
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    "argv, message",
    [
        (["float", "out"], "the following arguments are required: --model"),
        (["--model", "serving_model:factory"], "required: SOURCE, TARGET"),
        (["float", "out", "--model", "serving_model"], "package.module:factory"),
        (["float", "out", "--model", "none.py:f"], "the file none.py does not exist"),
        ([*MODEL, "--preset", "fp9"], "no preset 'fp9'; did you mean 'fp8'?"),
        ([*MODEL, "--preset", "gptq=4"], "write --preset gptq --fwd-bits 4"),
        ([*MODEL, "--preset", "none_such"], "there are fully_quantized, weight_only"),
    ],
)
def test_malformed_command_lines(argv, message, folder, capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(["convert", *argv])
    err = capsys.readouterr().err
    assert raised.value.code == 2
    assert message in err and err.count("\n") == 1


def test_a_factory_in_a_file_of_a_float_model(folder, capsys, monkeypatch):
    (folder / "below").mkdir()
    (folder / "serving_model.py").rename(folder / "below" / "in_a_file.py")
    model = "below/in_a_file.py:float_model"
    argv = ["float", "out", "--model", model, "--preset", "weight_only", "--json"]
    code, out, _ = run(capsys, *argv)
    assert code == 0 and len(json.loads(out)["weights"]) == 3
    wanted = convert(models.MlpBlock(config.weight_only()), VARIABLES, X)
    served = checkpoint.load_serving("out")
    jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, (served, wanted)))
    (folder / "json.py").write_text("")
    argv = ["float", "out2", "--model", "json.py:factory"]
    assert "a module 'json' of its own; rename" in error(capsys, *argv)


@pytest.mark.parametrize(
    ("factory", "holds_params_alone"),
    [("factory", False), pytest.param("float_model", True, marks=pytest.mark.slow)],
)
def test_statistics_by_examples(factory, holds_params_alone, folder, capsys):
    if holds_params_alone:
        save(folder / "params", VARIABLES["params"], "orbax")
    np.savez(folder / "data.npz", np.concatenate([X, 2 * X]))
    source = "params" if holds_params_alone else "float"
    model = ["--model", f"serving_model:{factory}"]
    argv = [source, "out", *model, "--preset", "static_int8"]
    assert "--calibrate" in error(capsys, *argv)
    argv += ["--calibrate", "data.npz", "--batch-size", str(len(X))]
    assert run(capsys, *argv)[0] == 0
    model = models.MlpBlock(config.static_int8())
    if factory == "float_model":
        model = quantize_model(models.MlpBlock(None), config.static_int8())
    wanted = calibrate_in_float(model, VARIABLES, [X, 2 * X])
    served = [
        model.apply(serving, X)
        for serving in (
            checkpoint.load_serving("out", model),
            convert(model, wanted, X),
        )
    ]
    np.testing.assert_array_equal(*served)
    # Statistics of other examples are another conversion.
    np.savez(folder / "data.npz", 5 * X)
    assert run(capsys, *argv, "--overwrite")[0] == 0
    other = model.apply(checkpoint.load_serving("out", model), X)
    assert (other != served[0]).any()


def test_statistics_of_an_nnx_model_by_examples(nnx_model, folder, capsys):
    np.savez(folder / "data.npz", np.concatenate([X, 2 * X]))
    options = ["--model", "serving_model:nnx_factory", "--preset", "static_int8"]
    argv = ["nnx", "out", *options]
    assert "--calibrate" in error(capsys, *argv)
    assert run(capsys, *argv, "--calibrate", "data.npz", "--batch-size", "4")[0] == 0
    model = aqt_nnx.quantize_model(nnx_model, config.static_int8())
    loaded = checkpoint.load_serving("out", model)
    aqt_nnx.calibrate_in_float(model, [X, 2 * X])
    served = [
        nnx_models.call(one, nnx_models.X)
        for one in (loaded, aqt_nnx.convert(model, X))
    ]
    np.testing.assert_array_equal(*served)


def test_show_of_a_float_checkpoint(folder, capsys):
    assert cli.main(["show", "float"]) == 0
    shown = capsys.readouterr().out
    for line in ("params ", "    kernel        float32[8, 8]  256 bytes"):
        assert line in shown
    assert cli.main(["show", "float", "--depth", "1"]) == 0
    assert "kernel" not in capsys.readouterr().out
    assert cli.main(["show", "float", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["bytes"] == sum(x.nbytes for x in jax.tree.leaves(VARIABLES))
    assert data["arrays"][0].keys() == {"path", "shape", "dtype", "bytes"}


def test_show_of_quantized_files_of_others(tmp_path, capsys):
    file = edited.OTHERS / "gguf" / "tiny.gguf"
    assert cli.main(["show", str(file), "--depth", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("format gguf:")
    assert "Q4_K[3, 256], 4.5 bits  432 bytes" in shown
    folder = edited.OTHERS / "compressed_w4_affine"
    assert cli.main(["show", str(folder), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["format"] == "compressed-tensors"
    assert {
        "path": "model/layers/0/mlp/up_proj/weight",
        "shape": [10, 96],
        "dtype": "int4, blocks of 1 x 32, zero points",
        "bytes": 640,
    } in data["arrays"]
    for size in (100, 0):
        (tmp_path / "x.gguf").write_bytes(file.read_bytes()[:size])
        assert cli.main(["show", str(tmp_path / "x.gguf")]) == 2
        assert "is damaged, or no GGUF file" in capsys.readouterr().err


def test_show_of_an_optimizer_state_in_a_tuple(tmp_path, capsys):
    with ocp.PyTreeCheckpointer() as checkpointer:
        state = {"mu": np.ones((3, 2), "float32"), "count": np.int32(0)}
        checkpointer.save(tmp_path / "run", {"w": np.ones(4), "opt": (state,)})
    assert cli.main(["show", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "1 array, 2 others  32 bytes" in shown
    assert "float32[3, 2] in a list or a tuple" in shown


def test_show_of_a_manager(folder, capsys):
    with ocp.CheckpointManager(folder / "run") as manager:
        for step in (2, 10):
            manager.save(step, args=ocp.args.StandardSave({"step": step, "w": X}))
    assert cli.main(["show", "run"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("steps 2, 10; the latest, run/10:\n")
    assert "\nw " in shown and "\nstep " in shown


def test_show_of_something_else(folder, capsys):
    (folder / "empty").mkdir()
    assert cli.main(["show", "empty"]) == 2
    assert "is not an Orbax checkpoint" in capsys.readouterr().err
    assert cli.main(["show", "none"]) == 2
    assert "none does not exist" in capsys.readouterr().err
