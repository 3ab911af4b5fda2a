"""``aqtlite edge``, as a user runs it."""

import importlib.util
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from aqtlite import cli, config, edge
from aqtlite.cli import edge as edge_command
from aqtlite.edge.export import TARGETS
from tests.checkpoint.support import save
from tests.common import mostly_slow, normal

pytestmark = pytest.mark.code("quick")

needs_converter = pytest.mark.skipif(
    importlib.util.find_spec("litert_converter") is None,
    reason="needs the packages of the extra edge",
)
FACTORY = """
import jax, jax.numpy as jnp
from flax import linen as nn, nnx
from aqtlite import config
from aqtlite.flax import quantize_model
from tests.flax.nnx import models as nnx_models

def shape(*dims, dtype="float32"):
    return jax.ShapeDtypeStruct(dims, dtype)

class Net(nn.Module):
    @nn.compact
    def __call__(self, x, y=None, train=False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
        return nn.Dense(3)(nn.relu(x) if y is None else nn.relu(x) + y)

class Sorted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.sort(nn.Dense(8)(x))

def factory():
    return Net(), (shape(2, 4),)

def two():
    return Net(), (shape(2, 4), shape(2, 8)), {"train": False}

def training():
    return Net(), (shape(2, 4),), {"train": True}

def wide():
    return Net(), (shape(2, 5),)

def array():
    return Net(), (shape(2, 4),), {"y": shape(2, 8)}

def scalar():
    return Net(), (shape(2, 4), shape())

def quantized():
    return quantize_model(Net(), config.fully_quantized()), (shape(2, 4),)

def sorted_():
    return Sorted(), (shape(2, 4),)

def of_nnx():
    model = nnx.eval_shape(lambda: nnx_models.Mlp(nnx.Rngs(0)))
    return model, (shape(4, 8),)

def hidden():
    model, args = of_nnx()
    return model, args, {"method": "hidden"}
"""
ANY: dict = {suffix: () for suffix in TARGETS}
"""Packages that are needed: for errors that come before any file is written."""

X = np.asarray(normal((7, 4)))
Y = np.asarray(normal((7, 8), 1))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a module, checkpoints and data."""
    folder = tmp_path_factory.mktemp("edge")
    (folder / "deploy.py").write_text(FACTORY)
    sys.path.insert(0, str(folder))
    import deploy

    variables = deploy.Net().init(jax.random.key(2), X)
    save(folder / "float", variables, "safetensors")
    broken = jax.tree.map(lambda x: x * jnp.nan, variables)
    save(folder / "broken", broken, "safetensors")
    half = jax.tree.map(lambda x: x.astype("bfloat16"), variables)
    save(folder / "half", half, "msgpack")
    variables = deploy.Sorted().init(jax.random.key(2), X)
    save(folder / "sorted", variables, "safetensors")
    np.savez(folder / "data.npz", X)
    yield folder, deploy
    sys.path.remove(str(folder))
    del sys.modules["deploy"]


@pytest.fixture
def folder(made, monkeypatch):
    monkeypatch.chdir(made[0])
    yield made[0]
    for file in made[0].glob("out*"):
        file.unlink()


def run(capsys, *argv):
    code = cli.main(["edge", *map(str, argv)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


ARGV = ["float.safetensors", "out.tflite", "--model", "deploy:factory"]
DATA = ["--calibrate", "data.npz"]


def error(capsys, *argv):
    code, _, err = run(capsys, *argv)
    assert code == 2, err
    assert err.startswith("aqtlite edge: error: ") and err.count("\n") == 1
    return err


def _interpret(path, *inputs):
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(path))
    runner = interpreter.get_signature_runner()
    names = interpreter.get_signature_list()["serving_default"]["inputs"]
    return runner(**dict(zip(names, inputs, strict=True)))["output"]


@pytest.mark.slow
@needs_converter
def test_linen(folder, made, capsys):
    code, out, err = run(capsys, *ARGV, *DATA, "--save-ranges", "out.json")
    assert (code, err) == (0, "")
    assert "FULLY_CONNECTED" in out and "int8[2,3]" in out and "\x1b" not in out
    last = out.splitlines()[-1]
    assert last.startswith("wrote out.tflite: 2 operators, 0 of them in float, ")
    model, (x,) = made[1].factory()
    ranges = edge.Ranges.load("out.json")
    assert ranges["input"] == (float(X.min()), float(X.max()))
    variables = _variables("float.safetensors", model, x)
    simulation = edge.simulate(model, variables, ranges, x)
    integers = simulation.values(X[:2])["input"]
    np.testing.assert_array_equal(_interpret("out.tflite", integers), simulation(X[:2]))
    first = (folder / "out.tflite").read_bytes()
    assert "out.tflite exists; --overwrite" in error(capsys, *ARGV, *DATA)
    again = [*ARGV, "--ranges", "out.json", "--overwrite"]
    assert run(capsys, *again)[0] == 0
    assert (folder / "out.tflite").read_bytes() == first
    ranges = json.loads((folder / "out.json").read_text())
    ranges["ranges"]["input"] = {"low": -9, "high": 9}
    (folder / "out.json").write_text(json.dumps(ranges))
    assert run(capsys, *again)[0] == 0
    assert (folder / "out.tflite").read_bytes() != first


def _variables(path, model, x):
    from aqtlite.checkpoint.load_float import load_float

    return load_float(path, model, (x,), {})


@needs_converter
def test_rules_float_interface_keyword_arguments_and_several_inputs(folder, capsys):
    rules = edge.rules.to_json([edge.Rule(path="Net/Dense_1", is_float=True)])
    (folder / "out_rules.json").write_text(rules)
    np.savez(folder / "out.npz", b10=Y, b9=X.astype("float64"))
    argv = ["half.msgpack", "out.tflite", "--model", "deploy:two"]
    options = ["--calibrate", "out.npz", "--rules", "out_rules.json"]
    code, out, _ = run(capsys, *argv, *options, "--interface", "float")
    assert code == 0 and "float32[2,3]" in out
    assert " 0 of them in float" not in out
    assert _interpret("out.tflite", X[:2], Y[:2]).dtype == np.float32


@needs_converter
def test_an_interface_of_uint8(folder, capsys):
    assert run(capsys, *ARGV, *DATA, "--interface", "uint8")[0] == 0
    found = _interpret("out.tflite", np.full((2, 4), 200, np.uint8))
    assert found.dtype == np.uint8


@pytest.mark.parametrize(
    "how, dtype, error_of_output",
    [
        (["--preset", "weight_only"], "int8", 0.02),
        (["--preset", "weight_only", "--fwd-bits", "4"], "int4", 0.3),
        (["--preset", "qat"], "int8", 0.03),
        (["--config", "out_cfg.json"], "int4", 0.3),
    ],
)
@needs_converter
def test_files_without_ranges(
    folder, made, capsys, monkeypatch, how, dtype, error_of_output
):
    (folder / "out_cfg.json").write_text(config.to_json(config.w4a8()))
    code, out, err = run(capsys, *ARGV, *how, "--json")
    assert (code, err) == (0, "")
    shown = json.loads(out)
    asked = {one["asked"].split(" weights")[0] for one in shown["contractions"]}
    assert asked == {dtype}
    model, (x,) = made[1].factory()
    variables = _variables("float.safetensors", model, x)
    expected = model.apply(variables, X[:2])
    error = np.linalg.norm(_interpret("out.tflite", X[:2]) - expected)
    assert error < error_of_output * np.linalg.norm(expected)


def test_errors_of_files_without_ranges(folder, capsys, monkeypatch):
    monkeypatch.setattr(edge_command, "_PACKAGES", ANY)
    preset = [*ARGV, "--preset", "weight_only"]
    assert "needs ranges" in error(capsys, *preset, "--interface", "uint8")
    for how in (DATA, ["--preset", "w4a8"]):
        assert "--fwd-bits goes with" in error(capsys, *ARGV, *how, "--fwd-bits", 4)
    (folder / "out_rules.json").write_text(edge.rules.to_json([]))
    text = error(capsys, *preset, "--rules", "out_rules.json")
    assert "--rules select the integers of a file with ranges" in text
    (folder / "out_cfg.json").write_text(config.to_json(config.fp8()))
    text = error(capsys, *ARGV, "--config", "out_cfg.json")
    assert "weights in files are integers" in text
    text = error(capsys, *ARGV, "--preset", "qat", "--fwd-bits", 4)
    assert "runtimes quantize activations to 8 bits" in text and "w4a8" in text


@pytest.mark.slow
@needs_converter
def test_nnx(folder, capsys):
    from tests.flax.nnx import models

    model = models.Mlp(nnx.Rngs(0))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "nnx", nnx.state(model))
    np.savez(folder / "out.npz", models.X)
    argv = ["nnx", "out.tflite", "--calibrate", "out.npz", "--model"]
    assert run(capsys, *argv, "deploy:of_nnx", "--interface", "float")[0] == 0
    out = _interpret("out.tflite", np.asarray(models.X))
    np.testing.assert_allclose(out, model(models.X), atol=0.05)
    code, out, _ = run(capsys, *argv, "deploy:hidden", "--overwrite")
    assert code == 0 and "int8[4,16]" in out
    code, out, err = run(capsys, *argv, "deploy:hidden", "--overwrite", "--json")
    shown = json.loads(out)
    assert (code, err, shown["target"]) == (0, "", "out.tflite")
    assert shown["bytes"] == (folder / "out.tflite").stat().st_size
    assert shown["operators"][-1]["outputs"] == shown["outputs"]
    assert [one["shape"] for one in shown["outputs"]] == [[4, 16]]


@pytest.mark.parametrize(
    "how",
    mostly_slow(["mean", "average=0.5", "percentile=90", "mse"], "average=0.5", "mse"),
)
def test_calibrations(how, folder, capsys, monkeypatch):
    found = {}
    monkeypatch.setattr("aqtlite.cli.edge._PACKAGES", ANY)

    def stop(model, variables, ranges, *args, **kwargs):
        found["ranges"] = ranges
        raise ValueError("stop")

    monkeypatch.setattr(edge, "export", stop)
    argv = [*ARGV, *DATA, "--batch-size", "4", "--calibration"]
    assert "stop" in error(capsys, *argv, "max")
    widest = found.pop("ranges")
    assert "stop" in error(capsys, *argv, how)
    low, high = found["ranges"]["input"]
    assert widest["input"].low <= low and high <= widest["input"].high
    # Of so few values, 8 bits are worth no clipping.
    assert (found["ranges"] == widest) == (how == "mse")


NPZ = {
    "nan": {"x": np.where(np.arange(28).reshape(7, 4) == 9, np.nan, X)},
    "huge": {"x": X.astype("float64") * 1e300},
    "empty": {"x": X[:0]},
    "nothing": {},
    "two": {"a": X, "b": Y},
    "wide": {"x": Y},
    "flat": {"x": X[0]},
    "integers": {"x": np.ones((7, 4), np.uint8)},
    "text": {"x": np.full((7, 4), "a")},
    "objects": {"x": np.array([None])},
    "unequal": {"a": X, "b": Y[:3]},
}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nan", "x holds NaN or infinities, in example 2"),
        ("huge", "x holds NaN or infinities, in example 0"),
        ("empty", "x holds no example: ranges come from data"),
        ("nothing", "holds no array: ranges come from data"),
        ("two", "holds 2 arrays (a, b), and the model takes 1: float32[2, 4]"),
        ("wide", "x is float32[7, 8]; the model takes float32[N, 4]"),
        ("flat", "x is float32[4]; the model takes float32[N, 4]"),
        ("integers", "x is uint8, and the model takes float32"),
        ("text", "x is str"),
        ("objects", "out.npz: x is damaged, or holds objects of Python"),
        ("unequal", "different numbers of examples: a of 7, b of 3"),
    ],
)
def test_wrong_data(name, words, folder, capsys, monkeypatch):
    monkeypatch.setattr("aqtlite.cli.edge._PACKAGES", ANY)
    np.savez(folder / "out.npz", **NPZ[name])
    model = "deploy:two" if name == "unequal" else "deploy:factory"
    argv = [*ARGV[:2], "--model", model, "--calibrate", "out.npz"]
    assert words in error(capsys, *argv)
    assert not (folder / "out.tflite").exists()


@pytest.mark.parametrize(
    ("header", "byte", "words"),
    [
        (b"PK\3\4", 0, "is no whole .npz file"),
        (b"PK\1\2", 10, "cannot be read: That compression method is not supported"),
    ],
    ids=["signature", "compression"],
)
def test_damaged_data(header, byte, words, folder, capsys, monkeypatch):
    monkeypatch.setattr("aqtlite.cli.edge._PACKAGES", ANY)
    np.savez(folder / "out.npz", X)
    data = bytearray((folder / "out.npz").read_bytes())
    data[data.index(header) + byte] ^= 1
    (folder / "out.npz").write_bytes(data)
    assert words in error(capsys, *ARGV, "--calibrate", "out.npz")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["float.safetensors", "out.bin", *ARGV[2:], *DATA],
            "end in .tflite or .onnx,",
        ),
        (["none", *ARGV[1:], *DATA], "none does not exist"),
        ([*ARGV, "--calibrate", "none.npz"], "none.npz does not exist"),
        ([*ARGV, "--calibrate", "deploy.py"], "deploy.py is no whole .npz"),
        ([*ARGV, "--ranges", "none.json"], "none.json"),
        ([*ARGV, "--ranges", "deploy.py"], "deploy.py: $: not valid JSON"),
        ([*ARGV, *DATA, "--rules", "none.json"], "none.json does not exist"),
        ([*ARGV, *DATA, "--rules", "deploy.py"], "deploy.py: $: not valid JSON"),
        ([*ARGV, *DATA, "--calibration", "min"], "write max, mean, average[=DECAY]"),
        ([*ARGV, *DATA, "--calibration", "max=3"], "write max, mean"),
        ([*ARGV, *DATA, "--calibration", "percentile"], "write max, mean"),
        ([*ARGV, *DATA, "--calibration", "percentile=x"], "percentile=x: could not"),
        ([*ARGV, *DATA, "--calibration", "percentile=101"], "percentile=101: "),
        ([*ARGV, *DATA, "--batch-size", "0"], "--batch-size must be at least 1"),
        ([*ARGV, *DATA, "--save-ranges", "data.npz"], "data.npz exists; --overwrite"),
        ([*ARGV, *DATA, "--save-ranges", "."], ". is a folder"),
        ([*ARGV, *DATA, "--save-ranges", "gs://b/r.json"], "an address (gs://)"),
        ([ARGV[0], "gs://b/m.tflite", *ARGV[2:], *DATA], "an address (gs://)"),
        (
            [*ARGV, "--ranges", "deploy.py", "--save-ranges", "b"],
            "goes with --calibrate",
        ),
        (["broken.safetensors", *ARGV[1:], *DATA], "holds NaN or infinities"),
        (["sorted.safetensors", *ARGV[1:], *DATA], "variables of this model"),
        ([*ARGV, *DATA, "--subtree", "none"], "has no subtree 'none'"),
        ([*ARGV, *DATA, "--processors", "vnni"], "goes with .onnx files"),
    ],
)
def test_errors_are_one_line(argv, words, folder, capsys, monkeypatch):
    monkeypatch.setattr("aqtlite.cli.edge._PACKAGES", ANY)
    assert words in error(capsys, *argv)
    assert not (folder / "out.tflite").exists()


def test_links_are_refused_before_any_work(folder, capsys, monkeypatch):
    monkeypatch.setattr("aqtlite.cli.edge._PACKAGES", ANY)
    for name in ("out.tflite", "out.json"):
        (folder / name).symlink_to("deploy.py")
    argv = ["broken.safetensors", "out.tflite", *ARGV[2:], *DATA, "--overwrite"]
    assert "out.tflite is a symbolic link; name what it" in error(capsys, *argv)
    argv[1:2] = ["out_2.tflite", "--save-ranges", "out.json"]
    assert "out.json is a symbolic link; name what it" in error(capsys, *argv)
    assert (folder / "deploy.py").read_text() == FACTORY


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("calibrate", "interrupted. Run the same command to start over"),
        ("export", "interrupted. The ranges are in out.json: --ranges out.json in "),
    ],
)
def test_an_interruption_says_how_to_go_on(step, words, folder, capsys, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("aqtlite.cli.edge._PACKAGES", ANY)
    monkeypatch.setattr(edge, step, interrupt)
    code, _, err = run(capsys, *ARGV, *DATA, "--save-ranges", "out.json")
    assert code == 130
    assert words in err and err.count("\n") == 1
    assert (folder / "out.json").exists() == (step == "export")
    assert not (folder / "out.tflite").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wide", "the model's is float32[5, 8]"),
        ("training", "tracing Net with the sample inputs float32[2, 4], True failed"),
        ("array", "sample_kwargs holds an array"),
        ("scalar", "which has no axis that counts examples"),
        ("quantized", "not what quantize_model made of it"),
    ],
)
def test_wrong_models(name, words, folder, capsys, monkeypatch):
    monkeypatch.setattr("aqtlite.cli.edge._PACKAGES", ANY)
    np.savez(folder / "out.npz", *(X, Y)[: 2 if name == "scalar" else 1])
    if name == "wide":
        np.savez(folder / "out.npz", np.pad(X, ((0, 0), (0, 1))))
    argv = [*ARGV[:2], "--model", f"deploy:{name}", "--calibrate", "out.npz"]
    assert words in error(capsys, *argv)


def test_an_operation_without_an_integer_form(folder, capsys, monkeypatch):
    monkeypatch.setattr("aqtlite.cli.edge._PACKAGES", ANY)
    argv = ["sorted.safetensors", "out.tflite", "--model", "deploy:sorted_", *DATA]
    assert "sort" in error(capsys, *argv)
    assert not (folder / "out.tflite").exists()


def test_onnx(folder, capsys):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    argv = [ARGV[0], "out.onnx", *ARGV[2:], *DATA, "--processors", "vnni"]
    code, out, _ = run(capsys, *argv)
    assert code == 0 and out.splitlines()[-1].startswith("wrote out.onnx: ")
    assert "wrong on x86-64 without VNNI" in out
    onnx.checker.check_model(onnx.load("out.onnx"))


@pytest.mark.parametrize(
    ("target", "package", "extra"),
    [("out.tflite", "litert_converter", "edge"), ("out.onnx", "onnxruntime", "onnx")],
)
def test_missing_packages(target, package, extra, folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: sys.modules.get(name, 1)
    )
    shown = error(capsys, ARGV[0], target, *ARGV[2:], *DATA)
    assert f"needs the package {package!r}: pip install 'aqtlite[{extra}]'" in shown


def test_every_target_of_the_library_is_known():
    assert set(edge_command._PACKAGES) == set(TARGETS)
    assert set(edge_command._EXTRAS) == set(TARGETS)


def test_an_export_that_fails_leaves_what_was_there(folder, capsys, monkeypatch):
    monkeypatch.setattr("aqtlite.cli.edge._PACKAGES", ANY)
    monkeypatch.setitem(sys.modules, "litert_converter", None)
    (folder / "out.tflite").write_bytes(b"before")
    assert "aqtlite[edge]" in error(capsys, *ARGV, *DATA, "--overwrite")
    assert (folder / "out.tflite").read_bytes() == b"before"


def test_a_full_disk_is_named_with_the_path(folder, capsys, monkeypatch, full_disk):
    monkeypatch.setattr("aqtlite.cli.edge._PACKAGES", ANY)
    why = "out.json cannot be written: No space left on device"
    assert why in error(capsys, *ARGV, *DATA, "--save-ranges", "out.json")
    assert not list(folder.glob("out*"))


def test_help_says_how_data_is_read(capsys):
    with pytest.raises(SystemExit):
        cli.main(["edge", "--help"])
    shown = capsys.readouterr().out
    assert (
        "arr_0," in shown
        and "--save-ranges" in shown
        and "(default 32)" in " ".join(shown.split())
    )


def test_data_or_ranges_but_not_both(capsys):
    for options in ([], [*DATA, "--ranges", "ranges.json"]):
        with pytest.raises(SystemExit) as raised:
            cli.main(["edge", *ARGV, *options])
        assert raised.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1
