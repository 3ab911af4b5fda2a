"""A checkpoint converted on disk holds what `convert` gives in memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from safetensors import flax as safetensors_flax

from aqtlite import checkpoint, config
from aqtlite.flax import AqtDotGeneral, convert, quantize_model
from aqtlite_demo.model import Transformer
from tests.checkpoint.support import FORMATS, assert_same, save, snapshot
from tests.common import mostly_slow, quick_jit
from tests.flax import models
from tests.flax.support import DG, INT8, XX, X, apply, assert_equal, init

pytestmark = pytest.mark.code("quick")


class Gated(nn.Module):
    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(), (8, 24))
        gate = self.param("gate", nn.initializers.normal(), (8, 1))
        return DG(x, w * gate, (((1,), (0,)), ((), ())))


TOKENS = jnp.arange(8).reshape(2, 4)
MODELS = {
    "one instance": (models.MlpBlock(INT8, depth=2), X),
    "setup": (models.Setup(INT8), X),
    "slices of a stack": (models.Loop(INT8), X),
    "transposed": (models.Transformed(INT8, "transpose"), X),
    "masked": (models.Transformed(INT8, "mask"), X),
    "nothing to freeze": (models.Transformed(INT8, "standardise"), X),
    "of two parameters": (Gated(), X),
    "tied": (models.Tied(INT8), TOKENS),
    "weight first": (models.WeightFirst(INT8), X),
    "attention": (models.Attention(INT8, "einsum_dot_general"), XX),
    "batch norm": (models.Trained(INT8), X),
    "scanned": (models.scanned(models.Layer)(INT8), X, None),
    "mapped over the last axis": (
        nn.vmap(
            models.MlpBlock,
            variable_axes={"params": -1, "aqt": -1},
            split_rngs={"params": True},
        )(INT8, depth=2),
        XX,
    ),
    "demo": (Transformer(1, 16, 2, 8, cfg=INT8), TOKENS),
    "by rules": (quantize_model(models.scanned(models.Layer)(None), INT8), X, None),
    "int4": (models.MlpBlock(config.fully_quantized(fwd_bits=4), depth=2), X),
    "ternary": (models.MlpBlock(config.weight_only(bits=2), depth=2), X),
}


# That what `convert` gives serves what was trained is tested in `tests/flax`.
SERVED = ("one instance", "of two parameters", "scanned", "ternary")


@pytest.mark.parametrize(
    "name",
    mostly_slow(MODELS, "scanned", "by rules", "int4", "mapped over the last axis"),
)
def test_equals_convert(name, tmp_path):
    model, *args = MODELS[name]
    variables = init(model, *args)
    source = save(tmp_path / "float", variables, "orbax")
    before = snapshot(source)
    target = tmp_path / "serving"
    checkpoint.convert_checkpoint(source, target, model, *args)
    wanted = convert(model, variables, *args)
    for loaded in (
        checkpoint.load_serving(target),
        checkpoint.load_serving(target, model),
    ):
        assert_same(loaded, wanted)
    if name in SERVED:
        assert_equal(apply(model, loaded, *args), apply(model, variables, *args))
    assert snapshot(source) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["float", "serving"]


DTYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize(
    ("how", "dtype", "target"),
    [
        # Either target for every format and for every dtype. Each format once, and
        # each dtype, is in the quick part.
        pytest.param(
            *(how, dtype, ("out", "out.safetensors")[(i + j) % 2]),
            marks=[] if i == j else pytest.mark.slow,
        )
        for i, how in enumerate(FORMATS)
        for j, dtype in enumerate(DTYPES)
    ],
)
def test_formats_and_dtypes(how, dtype, target, tmp_path):
    model = models.MlpBlock(INT8, depth=2)
    variables = jax.tree.map(lambda x: x.astype(dtype), init(model, X))
    source = save(tmp_path / "float", variables, how)
    checkpoint.convert_checkpoint(source, tmp_path / target, model, X)
    loaded = checkpoint.load_serving(tmp_path / target, model)
    assert_same(loaded, convert(model, variables, X))


def test_int4_in_safetensors(tmp_path):
    model, x = MODELS["int4"]
    variables = init(model, x)
    source = save(tmp_path / "float", variables, "msgpack")
    checkpoint.convert_checkpoint(source, tmp_path / "out.safetensors", model, x)
    loaded = checkpoint.load_serving(tmp_path / "out.safetensors")
    assert_same(loaded, convert(model, variables, x))


def test_sharded_safetensors(tmp_path):
    model = models.MlpBlock(INT8, depth=2)
    variables = init(model, X)
    folder = tmp_path / "float"
    folder.mkdir()
    for i, (name, layer) in enumerate(variables["params"].items()):
        flat = {f"params.{name}.{key}": value for key, value in layer.items()}
        safetensors_flax.save_file(flat, folder / f"model-{i}.safetensors")
    checkpoint.convert_checkpoint(folder, tmp_path / "out", model, X)
    assert_same(checkpoint.load_serving(tmp_path / "out"), convert(model, variables, X))


def test_chunked_msgpack(tmp_path, monkeypatch):
    monkeypatch.setattr("flax.serialization.MAX_CHUNK_SIZE", 100)
    model = models.MlpBlock(INT8, depth=2)
    variables = init(model, X)
    source = save(tmp_path / "float", variables, "msgpack")
    assert b"__msgpack_chunked_array__" in source.read_bytes()
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)
    assert_same(checkpoint.load_serving(tmp_path / "out"), convert(model, variables, X))


def test_params_alone_and_a_step_of_a_manager(tmp_path):
    model = models.MlpBlock(INT8, depth=2)
    variables = init(model, X)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, args=ocp.args.StandardSave(variables["params"]))
    source = tmp_path / "run" / "3"
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)
    assert_same(checkpoint.load_serving(tmp_path / "out"), convert(model, variables, X))


def test_orbax_reads_the_target(tmp_path):
    """It is an ordinary checkpoint, also for others."""
    model = models.MlpBlock(INT8, depth=2)
    variables = init(model, X)
    source = save(tmp_path / "float", variables, "msgpack")
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(tmp_path / "out")
    wanted = convert(model, variables, X)["aqt"]["Dense_0"]["kernel"]["rhs"]
    found = tree["aqt"]["Dense_0"]["kernel"]["rhs"]
    np.testing.assert_array_equal(found["qvalue"], wanted.qvalue)
    np.testing.assert_array_equal(found["scale"], wanted.scale)


@pytest.mark.parametrize(
    "pattern",
    mostly_slow(
        ["Dense_1/kernel", "params/Dense_1/*", "aqt/Dense_1/*", "*_1/*"],
        *("Dense_1/kernel", "*_1/*"),
    ),
)
def test_keep_float(pattern, tmp_path):
    model, variables = models.MlpBlock(INT8), init(models.MlpBlock(INT8), X)
    source = save(tmp_path / "float", variables, "msgpack")
    report = checkpoint.convert_checkpoint(
        source, tmp_path / "out", model, X, keep_float=[pattern]
    )
    assert [row.origin for row in report.weights] == [
        ("params/Dense_0/kernel",),
        ("params/Dense_2/kernel",),
    ]
    for loaded in (
        checkpoint.load_serving(tmp_path / "out"),
        checkpoint.load_serving(tmp_path / "out", model),
    ):
        kernel = variables["params"]["Dense_1"]["kernel"]
        assert_same(loaded["params"]["Dense_1"]["kernel"], kernel)
    assert_equal(apply(model, loaded, X), apply(model, variables, X))


def test_keep_float_that_matches_nothing(tmp_path):
    model = models.MlpBlock(INT8)
    source = save(tmp_path / "float", init(model, X), "msgpack")
    with pytest.raises(checkpoint.CheckpointError, match=r"no weight matches 'Dens_1'"):
        checkpoint.convert_checkpoint(
            source, tmp_path / "out", model, X, keep_float=["Dens_1"]
        )


def test_packed(tmp_path):
    model = nn.Dense(24, dot_general=AqtDotGeneral(config.w4a8()))
    x = jnp.ones((2, 32))
    variables = init(model, x)
    source, target = save(tmp_path / "float", variables, "msgpack"), tmp_path / "packed"
    wanted = convert(model, variables, x, packed="cpu")
    report = checkpoint.convert_checkpoint(source, target, model, x, packed="cpu")
    (weight,) = report.weights
    assert (weight.shape, weight.grid) == ((24, 32), "int4")
    assert weight.bytes_after == 2 * 16 * 32 // 2 + 4 * 24
    assert_same(checkpoint.load_serving(target, model), wanted)
    assert_same(checkpoint.load_serving(target), wanted)


def test_dry_run_writes_nothing(tmp_path):
    model = models.MlpBlock(INT8)
    source = save(tmp_path / "float", init(model, X), "msgpack")
    report = checkpoint.convert_checkpoint(
        source, tmp_path / "out", model, X, dry_run=True
    )
    assert [path.name for path in tmp_path.iterdir()] == ["float.msgpack"]
    done = checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)
    assert (report.bytes_before, report.bytes_after) == (
        done.bytes_before,
        done.bytes_after,
    )
    assert report.seconds is None and done.seconds > 0
    assert all(row.decibels is None for row in report.weights)


def test_size_and_signal_to_noise(tmp_path):
    model = nn.Dense(512, dot_general=DG)
    x = jnp.ones((1, 512))
    source = save(tmp_path / "float", init(model, x), "orbax")
    report = checkpoint.convert_checkpoint(source, tmp_path / "out", model, x)
    assert report.bytes_after / report.bytes_before < 0.27

    def size(path):
        return sum(f.stat().st_size for f in path.rglob("*") if f.is_file())

    assert size(tmp_path / "out") / size(source) < 0.3  # 6 kB of metadata are in it
    (row,) = report.weights
    assert row.grid == "int8" and row.scales == 512 and row.shape == (512, 512)
    kernel = init(model, x)["params"]["kernel"]
    frozen = checkpoint.load_serving(tmp_path / "out")["aqt"]["kernel"]
    noise = kernel - frozen["rhs"].dequant()
    decibels = 10 * np.log10(np.sum(kernel**2) / np.sum(noise**2))
    assert row.decibels == pytest.approx(decibels, abs=0.01)


def test_sample_arguments_that_are_no_arrays(tmp_path):
    model, variables = models.Trained(INT8), init(models.Trained(INT8), X)
    source = save(tmp_path / "float", variables, "orbax")
    checkpoint.convert_checkpoint(
        source, tmp_path / "out", model, X, sample_kwargs={"train": False}
    )
    loaded = checkpoint.load_serving(tmp_path / "out", model)
    assert_same(loaded, convert(model, variables, X))


@pytest.mark.slow
def test_a_cache_is_left_to_serving(tmp_path):
    """A collection that only serving has is not asked of the source."""
    model, _ = MODELS["demo"]
    variables = init(model, TOKENS)
    source = save(tmp_path / "float", variables, "orbax")
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, TOKENS)
    decoder = model.clone(decode=True)
    cache = quick_jit(decoder.init)(jax.random.key(0), TOKENS[:, :1])["cache"]
    serving = checkpoint.load_serving(tmp_path / "out")
    decode = jax.jit(functools.partial(decoder.apply, mutable="cache"))
    got, _ = decode({**serving, "cache": cache}, TOKENS[:, :1])
    wanted, _ = decode({**variables, "cache": cache}, TOKENS[:, :1])
    assert_same(got, wanted)


def refuses(tmp_path, model, *args, match, variables=None, **options):
    variables = init(model, *args) if variables is None else variables
    source = save(tmp_path / "float", variables, "msgpack")
    with pytest.raises(ValueError, match=match):
        checkpoint.convert_checkpoint(source, tmp_path / "out", model, *args, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["float.msgpack"]


def test_nothing_to_freeze(tmp_path):
    refuses(tmp_path, nn.Dense(8), X, match="nothing to freeze")


def test_scales_that_are_not_in_the_source(tmp_path):
    model, floats = quantize_model(nn.Dense(8), config.lsq()), init(nn.Dense(8), X)
    match = r"lhs/step is missing.*saved after _, made = model.apply\(variables, x, mut"
    refuses(tmp_path, model, X, match=match, variables=floats)
    _, made = model.apply(floats, X, mutable=["params"])
    saved = save(tmp_path / "made", made, "msgpack")
    report = checkpoint.convert_checkpoint(saved, tmp_path / "out", model, X)
    assert len(report.weights) == 1


def test_another_models_variables(tmp_path):
    variables = init(models.MlpBlock(INT8), X)
    match = "params/bias is missing; .* params/Dense_0/bias is not in the model"
    refuses(tmp_path, nn.Dense(8, dot_general=DG), X, match=match, variables=variables)
    (tmp_path / "float.msgpack").unlink()
    match = r"params/kernel is float32\[8, 8\], the model's is float32\[8, 24\]"
    variables = init(nn.Dense(8), X)
    refuses(tmp_path, nn.Dense(24, dot_general=DG), X, match=match, variables=variables)


def test_a_module_that_contracts_two_weights_by_one_name(tmp_path):
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            dot_general = AqtDotGeneral(INT8, name="shared")
            for i in range(2):
                w = self.param(f"w{i}", nn.initializers.normal(), (8, 8))
                x = dot_general(x, w, (((1,), (0,)), ((), ())))
            return x

    model = Twice()
    variables = init(model, X)
    source = save(tmp_path / "float", variables, "msgpack")
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)
    serving = checkpoint.load_serving(tmp_path / "out", model)
    assert sorted(serving["aqt"]) == ["shared", "shared_1"]
    assert_equal(apply(model, variables, X), apply(model, serving, X))


def test_it_is_logged_and_not_printed(tmp_path, caplog, capsys):
    model = nn.Dense(8, dot_general=DG)
    source = save(tmp_path / "float", init(model, X), "msgpack")
    with caplog.at_level("INFO", logger="absl"):
        checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)
    messages = [text for text in caplog.messages if str(tmp_path / "out") in text]
    assert messages[0] == f"converting 288 bytes of {source} to {tmp_path / 'out'}"
    assert "1 frozen, 1 kept; SNR" in messages[-1]
    assert capsys.readouterr().out == ""
