"""Sources and targets that are damaged, wrong or malicious: one clear error each."""

import errno
import json
import shutil
import subprocess
import sys
import textwrap

import flax.linen as nn
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from flax import serialization
from safetensors import numpy as safetensors_numpy

from aqtlite import checkpoint, config
from aqtlite.flax import AqtDotGeneral, convert
from tests.checkpoint.support import FORMATS, assert_same, copy, edit, refuses, save
from tests.flax import models
from tests.flax.support import INT8, X, init

pytestmark = pytest.mark.code("quick")

MODEL = models.MlpBlock(INT8, depth=2)
VARIABLES = init(MODEL, X)


def convert_error(tmp_path, source, model=MODEL, **options):
    """The error of a conversion, which leaves no target."""
    with pytest.raises(checkpoint.CheckpointError) as info:
        checkpoint.convert_checkpoint(source, tmp_path / "out", model, X, **options)
    assert not (tmp_path / "out").exists()
    assert "\n" not in str(info.value)
    return str(info.value)


@pytest.mark.parametrize(
    ("name", "bad", "dtype"),
    [
        ("kernel", np.nan, "float32"),
        pytest.param("kernel", np.inf, "bfloat16", marks=pytest.mark.slow),
        pytest.param("kernel", -np.inf, "float16", marks=pytest.mark.slow),
        pytest.param("bias", np.nan, "bfloat16", marks=pytest.mark.slow),
        ("bias", np.inf, "float16"),
        pytest.param("bias", -np.inf, "float32", marks=pytest.mark.slow),
    ],
)
def test_nonfinite(name, bad, dtype, tmp_path):
    variables = jax.tree.map(lambda x: x.astype(dtype), VARIABLES)
    layer = variables["params"]["Dense_1"]
    layer[name] = layer[name].at[..., 3].set(bad)
    source = save(tmp_path / "float", variables, "msgpack")
    message = convert_error(tmp_path, source)
    assert f"params/Dense_1/{name}" in message and "--allow-nonfinite" in message
    checkpoint.convert_checkpoint(
        source, tmp_path / "out", MODEL, X, allow_nonfinite=True
    )
    loaded = checkpoint.load_serving(tmp_path / "out")
    if name == "bias":
        assert_same(loaded["params"]["Dense_1"]["bias"], layer["bias"])
    else:
        frozen = loaded["aqt"]["Dense_1"]["kernel"]["rhs"]
        assert not np.isfinite(frozen.scale.ravel()[3])


def test_existing_target(tmp_path):
    source = save(tmp_path / "float", VARIABLES, "msgpack")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("mine")
    with pytest.raises(checkpoint.CheckpointError, match="exists; --overwrite"):
        checkpoint.convert_checkpoint(source, tmp_path / "out", MODEL, X)
    with pytest.raises(checkpoint.CheckpointError, match="no converted checkpoint"):
        checkpoint.convert_checkpoint(
            source, tmp_path / "out", MODEL, X, overwrite=True
        )
    with pytest.raises(checkpoint.CheckpointError, match="exists; --overwrite"):
        # Not one is taken.
        batches = iter([X])
        checkpoint.convert_checkpoint(
            source, tmp_path / "out", MODEL, X, calibrate=batches
        )
    assert next(batches) is X
    assert (tmp_path / "out" / "precious").read_text() == "mine"
    (tmp_path / "out" / "precious").unlink()
    checkpoint.convert_checkpoint(source, tmp_path / "out", MODEL, X, overwrite=True)
    checkpoint.load_serving(tmp_path / "out")


def test_a_folder_of_somebody_else(tmp_path):
    source = save(tmp_path / "float", VARIABLES, "msgpack")
    folder = tmp_path / ".out.converting"
    folder.mkdir()
    (folder / "precious").write_text("mine")
    assert "is in the way" in convert_error(tmp_path, source)
    assert (folder / "precious").read_text() == "mine"


@pytest.mark.parametrize("size", [32, 64, 256])
def test_one_nan_in_a_large_weight(size, tmp_path):
    model = nn.Dense(size, dot_general=AqtDotGeneral(INT8))
    x = jnp.ones((1, size))
    variables = init(model, x)
    kernel = variables["params"]["kernel"]
    variables["params"]["kernel"] = kernel.at[3, 5].set(np.nan)
    source = save(tmp_path / "float", variables, "msgpack")
    with pytest.raises(checkpoint.CheckpointError, match="holds NaN"):
        checkpoint.convert_checkpoint(source, tmp_path / "out", model, x)


def test_what_the_formats_cannot_hold(tmp_path):
    variables = {"empty": jnp.ones((0, 3)), "w": jnp.ones((2, 2))}
    source = save(tmp_path / "float", variables, "msgpack")
    refuses("which is empty", copy, source, tmp_path / "out2")
    copy(source, tmp_path / "out.safetensors")
    assert checkpoint.load_serving(tmp_path / "out.safetensors")["empty"].size == 0


def test_names_with_dots(tmp_path):
    variables = {"a.b": jnp.ones(3), "w": jnp.ones((2, 2))}
    source = save(tmp_path / "float", variables, "msgpack")
    for target in (tmp_path / "out", tmp_path / "out.safetensors"):
        copy(source, target)
        assert sorted(checkpoint.load_serving(target)) == ["a.b", "w"]


def test_weights_that_are_not_floats(tmp_path):
    variables = jax.tree.map(lambda x: x.astype("int32"), VARIABLES)
    source = save(tmp_path / "float", variables, "msgpack")
    assert "is int32[8]" in convert_error(tmp_path, source).replace("[8, 8]", "[8]")


@pytest.mark.parametrize("inside", [".", "sub", ".."])
def test_target_in_source(inside, tmp_path):
    source = save(tmp_path / "a" / "float", VARIABLES, "orbax")
    with pytest.raises(checkpoint.CheckpointError, match="contains the other"):
        checkpoint.convert_checkpoint(source, source / inside, MODEL, X, overwrite=True)
    checkpoint.convert_checkpoint(source, tmp_path / "out", MODEL, X)


@pytest.mark.parametrize("target", ["out", "out.safetensors"])
def test_source_that_is_converted(target, tmp_path):
    source = save(tmp_path / "float", VARIABLES, "msgpack")
    checkpoint.convert_checkpoint(source, tmp_path / target, MODEL, X)
    with pytest.raises(checkpoint.CheckpointError, match="is converted already"):
        checkpoint.convert_checkpoint(tmp_path / target, tmp_path / "2", MODEL, X)


def test_no_checkpoint(tmp_path):
    assert "does not exist" in convert_error(tmp_path, tmp_path / "nothing")
    (tmp_path / "folder").mkdir()
    assert "_METADATA" in convert_error(tmp_path, tmp_path / "folder")
    (tmp_path / "file.bin").write_bytes(b"x")
    assert "neither" in convert_error(tmp_path, tmp_path / "file.bin")
    source = save(tmp_path / "float", VARIABLES, "msgpack")
    with pytest.raises(checkpoint.CheckpointError, match="read, not written"):
        checkpoint.convert_checkpoint(source, tmp_path / "x.msgpack", MODEL, X)


@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize(
    "share",
    [
        pytest.param(0.0, marks=pytest.mark.slow),
        0.5,
        pytest.param(0.99, marks=pytest.mark.slow),
    ],
)
def test_truncated_source(how, share, tmp_path):
    source = save(tmp_path / "float", VARIABLES, how)
    wanted = convert(MODEL, VARIABLES, X)
    files = [source] if source.is_file() else sorted(source.rglob("*"))
    seen = 0
    for file in [f for f in files if f.is_file() and f.stat().st_size > 500]:
        whole = file.read_bytes()
        file.write_bytes(whole[: int(len(whole) * share)])
        try:
            checkpoint.convert_checkpoint(
                source, tmp_path / "out", MODEL, X, overwrite=True
            )
        except checkpoint.CheckpointError:
            seen += 1
            assert not (tmp_path / "out").exists()
        else:  # Orbax leaves files that it does not read.
            assert_same(checkpoint.load_serving(tmp_path / "out"), wanted)
            shutil.rmtree(tmp_path / "out")
        file.write_bytes(whole)
    assert seen


@pytest.mark.parametrize("target", ["out", "out.safetensors"])
def test_every_flipped_bit_of_a_target_is_seen(target, tmp_path):
    source = save(tmp_path / "float", VARIABLES, "msgpack")
    target = tmp_path / target
    checkpoint.convert_checkpoint(source, target, MODEL, X)
    wanted = checkpoint.load_serving(target)
    files = [target] if target.is_file() else sorted(target.rglob("*"))
    files = [f for f in files if f.is_file() and f.stat().st_size]
    rng = np.random.default_rng(0)
    seen = 0
    for _ in range(40):
        file = files[rng.integers(len(files))]
        whole = file.read_bytes()
        data = bytearray(whole)
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        file.write_bytes(data)
        try:
            loaded = checkpoint.load_serving(target)
        except checkpoint.CheckpointError:
            seen += 1
        else:  # A bit of what nothing depends on: a comment, a name of the model.
            pairs = zip(jax.tree.leaves(loaded), jax.tree.leaves(wanted), strict=True)
            assert all(bool((a == b).all()) for a, b in pairs)
        file.write_bytes(whole)
    assert seen > 5


def test_missing_array_in_a_target(tmp_path):
    source = save(tmp_path / "float", VARIABLES, "msgpack")
    target = tmp_path / "out.safetensors"
    checkpoint.convert_checkpoint(source, target, MODEL, X)
    tensors = safetensors_numpy.load_file(target)
    import safetensors

    with safetensors.safe_open(target, framework="numpy") as file:
        metadata = file.metadata()
    del tensors["params.Dense_0.bias"]
    safetensors_numpy.save_file(tensors, target, metadata)
    with pytest.raises(checkpoint.CheckpointError, match="Dense_0/bias .* is missing"):
        checkpoint.load_serving(target)


def manifest_of(tmp_path):
    source = save(tmp_path / "float", VARIABLES, "msgpack")
    checkpoint.convert_checkpoint(source, tmp_path / "out", MODEL, X)
    return tmp_path / "out" / "aqtlite.json"


def test_damaged_metadata(tmp_path):
    source = save(tmp_path / "float", VARIABLES, "orbax")
    (source / "_METADATA").write_text("{")
    assert "_METADATA" in convert_error(tmp_path, source)


def test_what_is_no_model(tmp_path):
    source = save(tmp_path / "float", VARIABLES, "msgpack")
    message = convert_error(tmp_path, source, lambda params, x: x)
    assert "has to be a Linen module, an NNX module" in message


def test_newer_format(tmp_path):
    file = manifest_of(tmp_path)
    data = json.loads(file.read_text())
    file.write_text(json.dumps({**data, "format": 99, "version": "9.1"}))
    with pytest.raises(checkpoint.CheckpointError, match="format 99 by aqtlite 9.1"):
        checkpoint.load_serving(tmp_path / "out")


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": 3},
        {"arrays": {}},
        {"configs": []},
        {"nodes": {"a": {"kind": "pickle"}}},
        {"nodes": {"a": {"kind": "kernel", "shape": [-1], "dtype": "float32"}}},
        {"nodes": {"a": {"kind": "kernel", "shape": [1], "dtype": "object_"}}},
        {"format": None},
    ],
)
def test_damaged_manifest(change, tmp_path):
    manifest_of(tmp_path)
    edit(tmp_path / "out", lambda data: data.update(change))
    with pytest.raises(checkpoint.CheckpointError, match=r"manifest of .* is damaged"):
        checkpoint.load_serving(tmp_path / "out")


def test_manifest_that_is_gone(tmp_path):
    manifest_of(tmp_path).unlink()
    with pytest.raises(checkpoint.CheckpointError, match="not a converted checkpoint"):
        checkpoint.load_serving(tmp_path / "out")


def test_model_config_and_shapes_that_differ(tmp_path):
    manifest_of(tmp_path)

    def error(model):
        with pytest.raises(checkpoint.CheckpointError, match="another model") as info:
            checkpoint.load_serving(tmp_path / "out", model)
        return str(info.value)

    assert "fwd.lhs.numerics" in error(
        models.MlpBlock(config.fully_quantized(fwd_bits=4), depth=2)
    )
    assert "bias" in error(models.MlpBlock(INT8, use_bias=False, depth=2))
    assert "the model has not" in error(nn.Dense(8, dot_general=AqtDotGeneral(INT8)))
    assert "fails with the sample inputs" in error(models.Tied(INT8))


def test_names_that_lead_out(tmp_path):
    array = msgpack.ExtType(1, msgpack.packb(([2], "float32", b"\0" * 8)))
    for name in ("../../evil", "a//b", "/etc", ".", "/", ""):
        source = tmp_path / "evil.msgpack"
        source.write_bytes(msgpack.packb({name: array, "w": array}))
        args = (source, tmp_path / "out", MODEL, X)
        refuses("names an array", checkpoint.convert_checkpoint, *args)
    assert [path.name for path in tmp_path.iterdir()] == ["evil.msgpack"]


def test_sizes_are_checked_before_anything_is_read(tmp_path):
    huge = msgpack.packb(([1 << 40, 1 << 20], "float32", b"\0" * 8))
    source = tmp_path / "huge.msgpack"
    source.write_bytes(msgpack.packb({"w": msgpack.ExtType(1, huge)}))
    args = (tmp_path / "out", MODEL, X)
    refuses("does not fit", checkpoint.convert_checkpoint, source, *args)
    header = json.dumps(
        {"w": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
    ).encode()
    source = tmp_path / "huge.safetensors"
    source.write_bytes(len(header).to_bytes(8, "little") + header)
    refuses("cannot be read", checkpoint.convert_checkpoint, source, *args)


def test_no_pickle(tmp_path):
    """An object array, which NumPy would unpickle, is no array here."""
    source = tmp_path / "x.msgpack"
    evil = msgpack.packb(([1], "object", b"cos\nsystem\n"))
    source.write_bytes(msgpack.packb({"w": msgpack.ExtType(1, evil)}))
    args = (source, tmp_path / "out", MODEL, X)
    refuses("not a whole file", checkpoint.convert_checkpoint, *args)


@pytest.mark.parametrize("rest", [b"\0", b"\xc0" * 8, b"\x81\xa1w\xc0"])
def test_bytes_behind_the_tree_of_msgpack(rest, tmp_path):
    source = save(tmp_path / "float", VARIABLES, "msgpack")
    with source.open("ab") as file:
        file.write(rest)
    args = (source, tmp_path / "out", MODEL, X)
    refuses(f"{len(rest)} bytes follow its tree", checkpoint.convert_checkpoint, *args)


def test_full_disk_is_seen_before(tmp_path, monkeypatch):
    source = save(tmp_path / "float", VARIABLES, "msgpack")
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert "1.0 kB free" in convert_error(tmp_path, source)


def test_disk_that_is_full_for_the_first_file(tmp_path, monkeypatch):
    source = save(tmp_path / "float", VARIABLES, "msgpack")

    def write_file(path, data):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("aqtlite.checkpoint.staging.write_file", write_file)
    message = convert_error(tmp_path, source)
    assert message.startswith(f"{tmp_path / 'out'} cannot be written: ")
    assert "No space left on device" in message
    assert {one.name for one in tmp_path.iterdir()} == {source.name}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_disk_that_fills_up(name, tmp_path):
    """A limit on the size of files stands for a full disk."""
    model = nn.Dense(256, dot_general=AqtDotGeneral(INT8))
    x = jnp.ones((1, 256))
    source = tmp_path / "float.msgpack"
    source.write_bytes(serialization.to_bytes(init(model, x)))
    script = """
        import resource, signal, sys
        import flax.linen as nn, jax.numpy as jnp
        from aqtlite import checkpoint, config
        from aqtlite.flax import AqtDotGeneral, convert

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        model = nn.Dense(256, dot_general=AqtDotGeneral(config.fully_quantized()))
        target = sys.argv[2]
        for limit in (1000, 70_000 if target.endswith("s") else 60_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                checkpoint.convert_checkpoint(
                    sys.argv[1], target, model, jnp.ones((1, 256))
                )
            except checkpoint.CheckpointError as error:
                print(error)
    """
    target = tmp_path / name
    command = [sys.executable, "-c", textwrap.dedent(script), source, target]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all("resumes there" in line for line in lines)
    assert not target.exists()
    checkpoint.convert_checkpoint(source, target, model, x)
    checkpoint.load_serving(target, model)
