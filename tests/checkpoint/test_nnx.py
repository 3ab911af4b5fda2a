"""Checkpoints of NNX models, converted on disk, and the models that serve them."""

import json
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization, traverse_util
from jax.sharding import PartitionSpec as P
from safetensors import flax as safetensors_flax

from aqtlite import Rule, checkpoint, config
from aqtlite.flax.nnx import (
    AqtDotGeneral,
    calibrate,
    convert,
    init_state,
    quantize_model,
)
from tests.checkpoint import support
from tests.checkpoint.support import refuses, snapshot
from tests.flax.nnx.models import (
    CFG,
    TOKENS,
    Mlp,
    Scanned,
    Transformer,
    X,
    call,
)

pytestmark = pytest.mark.code("quick")

SAMPLE = jax.ShapeDtypeStruct(X.shape, X.dtype)


def make():
    return quantize_model(Mlp(nnx.Rngs(0)), CFG)


def abstract():
    return nnx.eval_shape(make)


MODEL = make()
# No two arrays are the same.
MODEL.up.bias[...] += 1


def save(path, tree, how="orbax"):
    """Writes a pure dictionary or a state as users do; returns where."""
    if how == "orbax":
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, tree)
        return path
    path = path.with_suffix(f".{how}")
    if how == "msgpack":
        path.write_bytes(serialization.to_bytes(tree))
    else:
        safetensors_flax.save_file(traverse_util.flatten_dict(tree, sep="."), path)
    return path


def pure(node):
    return nnx.to_pure_dict(nnx.state(node))


def assert_same(loaded, wanted, *args):
    """The same model: the same types and metadata of variables, and the same bits."""
    loaded_def, loaded_state = nnx.split(loaded)
    wanted_def, wanted_state = nnx.split(wanted)
    assert loaded_def == wanted_def
    as_data = [
        jax.tree.map(
            lambda x: (
                jax.random.key_data(x)
                if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
                else x
            ),
            state,
        )
        for state in (loaded_state, wanted_state)
    ]
    support.assert_same(*as_data)
    np.testing.assert_array_equal(call(loaded, *args), call(wanted, *args))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("nnx")


@pytest.fixture(scope="module")
def source(folder):
    return save(folder / "float", pure(MODEL))


@pytest.fixture(scope="module")
def converted(source, folder):
    checkpoint.convert_checkpoint(source, folder / "out", abstract(), SAMPLE)
    return folder / "out"


@pytest.fixture(scope="module")
def wanted():
    return convert(MODEL, X)


WAYS = {
    "the state": (lambda: nnx.state(MODEL), "orbax", "out"),
    "named as in a conversion": (lambda: {"model": pure(MODEL)}, "orbax", "out"),
    "a pure dictionary": (lambda: pure(MODEL), "orbax", "out.safetensors"),
    "safetensors": (lambda: pure(MODEL), "safetensors", "out.safetensors"),
    "msgpack": (lambda: pure(MODEL), "msgpack", "out"),
}


@pytest.mark.parametrize(("tree", "how", "out"), WAYS.values(), ids=WAYS)
def test_what_users_save(tree, how, out, wanted, tmp_path):
    saved = save(tmp_path / "float", tree(), how)
    checkpoint.convert_checkpoint(saved, tmp_path / out, abstract(), SAMPLE)
    assert_same(checkpoint.load_serving(tmp_path / out, abstract()), wanted, X)


def test_the_report_and_the_model_that_is_given(converted):
    report = checkpoint.summarize(converted)
    assert [row.path for row in report.weights] == [
        "aqt/down/kernel/rhs",
        "aqt/up/kernel/rhs",
    ]
    assert report.weights[0].origin == ("model/down/kernel",)
    # Names on disk, which do not change from version to version.
    manifest = json.loads((converted / "aqtlite.json").read_text())
    assert set(manifest["arrays"]) == {
        f"{name}{end}"
        for layer in ("up", "down")
        for name, end in (
            (f"aqt/{layer}/kernel/rhs", "/qvalue"),
            (f"aqt/{layer}/kernel/rhs", "/scale"),
            (f"model/{layer}/bias", ""),
        )
    }
    model = abstract()
    checkpoint.load_serving(converted, model)
    assert not model.aqt.frozen
    assert model.up.kernel.shape == (8, 16)


def transformer():
    return quantize_model(Transformer(nnx.Rngs(0), 1), CFG)


class TestTransformer:
    """Batch statistics, rngs, a tied embedding, lists of modules."""

    @pytest.fixture(scope="class")
    def model(self):
        return transformer()

    def test_keys_and_counts_come_along(self, model, tmp_path):
        saved = save(tmp_path / "float", nnx.state(model))
        shapes = nnx.eval_shape(transformer)
        checkpoint.convert_checkpoint(saved, tmp_path / "out", shapes, TOKENS)
        loaded = checkpoint.load_serving(tmp_path / "out", shapes)
        assert_same(loaded, convert(model, TOKENS), TOKENS)

    def test_rngs_may_be_those_of_the_model_that_serves(self, model, tmp_path):
        state = nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat))
        saved = save(tmp_path / "float", state)
        shapes = nnx.eval_shape(transformer)
        checkpoint.convert_checkpoint(saved, tmp_path / "out", shapes, TOKENS)
        loaded = checkpoint.load_serving(tmp_path / "out", transformer())
        wanted = convert(transformer(), TOKENS)
        np.testing.assert_array_equal(call(loaded, TOKENS), call(wanted, TOKENS))
        refuses(
            "no values for the rngs and caches .*rngs/count",
            checkpoint.load_serving,
            tmp_path / "out",
            shapes,
        )


def test_stacked_layers(tmp_path):
    model = quantize_model(Scanned(nnx.Rngs(0)), CFG)
    saved = save(tmp_path / "float", pure(model))
    checkpoint.convert_checkpoint(saved, tmp_path / "out", model, SAMPLE)
    assert_same(checkpoint.load_serving(tmp_path / "out", model), convert(model, X), X)


def test_injected_functions(tmp_path):
    model = Mlp(nnx.Rngs(0), dot_general=AqtDotGeneral(config.weight_only(4)))
    saved = save(tmp_path / "float", pure(model), "safetensors")
    out = tmp_path / "out.safetensors"
    checkpoint.convert_checkpoint(saved, out, model, SAMPLE)
    assert_same(checkpoint.load_serving(out, model), convert(model, X), X)


def test_another_method(tmp_path):
    def make():
        rules = [Rule(path="up", cfg=CFG)]
        return quantize_model(Mlp(nnx.Rngs(0)), rules)

    model, kwargs = make(), {"method": "hidden"}
    saved = save(tmp_path / "float", pure(model))
    checkpoint.convert_checkpoint(
        saved, tmp_path / "out", model, SAMPLE, sample_kwargs=kwargs
    )
    loaded = checkpoint.load_serving(tmp_path / "out", model)
    assert_same(loaded, convert(model, X, **kwargs), X)


def test_half_precision_is_that_of_the_source(tmp_path):
    half = jax.tree.map(lambda x: x.astype("bfloat16"), pure(MODEL))
    saved = save(tmp_path / "float", half)
    checkpoint.convert_checkpoint(saved, tmp_path / "out", abstract(), SAMPLE)
    model = make()
    nnx.update(model, jax.tree.map(lambda x: x.astype("bfloat16"), nnx.state(MODEL)))
    assert_same(
        checkpoint.load_serving(tmp_path / "out", abstract()), convert(model, X), X
    )


@pytest.mark.parametrize("name", ["static_int8", "lsq"])
def test_states(name, tmp_path):
    cfg = getattr(config, name)()

    def make():
        model = quantize_model(Mlp(nnx.Rngs(0)), cfg)
        init_state(model, X)
        model.eval()
        return model

    model, shapes = make(), nnx.eval_shape(make)
    if model.aqt.statistics:
        saved = save(tmp_path / "before", pure(model))
        refuses(
            "have seen no batch",
            checkpoint.convert_checkpoint,
            saved,
            tmp_path / "out",
            shapes,
            SAMPLE,
        )
        calibrate(model, [X])
        shapes.aqt.use_running_average = True
    saved = save(tmp_path / "float", pure(model))
    checkpoint.convert_checkpoint(saved, tmp_path / "out", shapes, SAMPLE)
    loaded = checkpoint.load_serving(tmp_path / "out", shapes)
    assert_same(loaded, convert(model, X), X)


def test_a_weight_that_stays_in_float(source, tmp_path):
    out = tmp_path / "out"
    checkpoint.convert_checkpoint(
        source, out, abstract(), SAMPLE, keep_float=["down/kernel"]
    )
    loaded = checkpoint.load_serving(out, abstract())
    assert list(loaded.aqt.frozen) == ["up"]
    np.testing.assert_array_equal(call(loaded, X), call(MODEL, X))
    refuses(
        "no weight matches 'upp'",
        checkpoint.convert_checkpoint,
        source,
        tmp_path / "other",
        abstract(),
        SAMPLE,
        keep_float=["upp"],
    )


def test_a_mesh(tmp_path):
    def make():
        init = nnx.with_partitioning(nnx.initializers.normal(), ("embed", "mlp"))
        layer = nnx.Linear(8, 4, kernel_init=init, rngs=nnx.Rngs(0))
        return quantize_model(layer, CFG)

    mesh = jax.make_mesh((1,), ("out",), axis_types=(jax.sharding.AxisType.Auto,))
    with nnx.use_eager_sharding(False):
        model = make()
        saved = save(tmp_path / "float", pure(model))
        checkpoint.convert_checkpoint(saved, tmp_path / "out", model, SAMPLE)
        rules = (("embed", None), ("mlp", "out"))
        loaded = checkpoint.load_serving(
            tmp_path / "out", model, mesh=mesh, rules=rules
        )
    frozen = loaded.aqt.frozen[""]["kernel"]
    assert frozen.qvalue.sharding == jax.NamedSharding(mesh, P("out", None))
    assert frozen.scale.sharding == jax.NamedSharding(mesh, P("out", None))
    assert loaded.bias.sharding == jax.NamedSharding(mesh, P())
    assert frozen.get_metadata("out_sharding") == ("mlp", "embed")
    assert_same(loaded, convert(model, X), X)


class TestRefusals:
    def convert(self, match, source, tmp_path, model=None, sample=(SAMPLE,), **kwargs):
        before = snapshot(tmp_path)
        refuses(
            match,
            checkpoint.convert_checkpoint,
            source,
            tmp_path / "new",
            abstract() if model is None else model,
            *sample,
            **kwargs,
        )
        assert snapshot(tmp_path) == before

    def test_sources_of_another_model(self, tmp_path):
        state = pure(MODEL)
        del state["up"]["kernel"]
        state["down"]["bias"] = state["down"]["kernel"]
        state["more"] = X
        saved = save(tmp_path / "float", state)
        lacks = "down/bias is float32.*up/kernel is missing; more is not in the model"
        self.convert(lacks, saved, tmp_path)

    def test_scales_that_are_not_in_the_source(self, tmp_path):
        saved = save(tmp_path / "float", pure(MODEL))
        model = quantize_model(MODEL, config.lsq())
        init_state(model, X)
        match = (
            r"lhs/step is missing.*saved after aqtlite.flax.nnx.init_state\(model, x"
        )
        with pytest.raises(checkpoint.CheckpointError, match=match):
            checkpoint.convert_checkpoint(saved, tmp_path / "out", model, SAMPLE)
        made = save(tmp_path / "made", nnx.state(model))
        report = checkpoint.convert_checkpoint(made, tmp_path / "out", model, SAMPLE)
        assert len(report.weights) == 2

    def test_a_training_state(self, tmp_path):
        saved = save(tmp_path / "run", {"step": X, "params": nnx.state(MODEL)})
        self.convert("--subtree params", saved, tmp_path)
        report = checkpoint.convert_checkpoint(
            saved, tmp_path / "out", abstract(), SAMPLE, subtree="params"
        )
        assert len(report.weights) == 2

    def test_a_training_state_of_other_shapes(self, tmp_path):
        params = jax.tree.map(lambda x: x[..., :1], nnx.state(MODEL))
        saved = save(tmp_path / "run", {"step": X, "params": params})
        self.convert("is not in the model, and 4 more$", saved, tmp_path)

    def test_serving_models(self, wanted, converted, tmp_path):
        saved = save(tmp_path / "serving", nnx.state(wanted))
        self.convert("holds frozen weights already", saved, tmp_path)
        self.convert("converted already", converted, tmp_path)
        refuses("converted already", checkpoint.load_serving, converted, wanted)

    def test_inputs_that_a_manifest_cannot_hold(self, source, tmp_path):
        self.convert("sample inputs", source, tmp_path, sample=(nnx.Rngs(0),))

    def test_inputs_that_the_model_does_not_take(self, source, tmp_path):
        wrong = jax.ShapeDtypeStruct((4, 9), X.dtype)
        self.convert(
            r"tracing Mlp .*float32\[4, 9\]", source, tmp_path, sample=(wrong,)
        )

    def test_loading_without_the_model(self, converted):
        refuses("of an NNX model, Mlp", checkpoint.load_serving, converted)
        refuses("not MlpBlock", checkpoint.load_serving, converted, support.MODEL)

    @pytest.mark.parametrize(
        ("field", "value"), [("sample", None), ("framework", "haiku")]
    )
    def test_damaged_manifests(self, field, value, converted, tmp_path):
        out = shutil.copytree(converted, tmp_path / "out")
        support.edit(out, lambda data: data.update({field: value}))
        refuses("is damaged", checkpoint.load_serving, out, abstract())

    def test_models_of_another_kind(self, tmp_path):
        saved = support.save(tmp_path / "float", support.VARIABLES, "msgpack")
        out = tmp_path / "out"
        checkpoint.convert_checkpoint(saved, out, support.MODEL, X)
        refuses("NNX module Mlp", checkpoint.load_serving, out, abstract())

    def test_other_models(self, converted):
        other = quantize_model(Mlp(nnx.Rngs(0)), config.weight_only(4))
        refuses("fwd.*numerics", checkpoint.load_serving, converted, other)
        rules = [Rule(path="up", cfg=CFG)]
        other = quantize_model(Mlp(nnx.Rngs(0)), rules)
        refuses("aqt/down/kernel", checkpoint.load_serving, converted, other)
        other = quantize_model(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), CFG)
        refuses("another model", checkpoint.load_serving, converted, other)


@pytest.mark.parametrize("how", ["orbax", "safetensors", "msgpack"])
@pytest.mark.parametrize("cfg", [config.static_int8("max"), config.lsq(8)])
def test_states_of_a_root_module(cfg, how, tmp_path):
    """Their path in the model is empty."""

    def root():
        model = quantize_model(nnx.Linear(*X.shape[-1:], 3, rngs=nnx.Rngs(0)), cfg)
        init_state(model, X)
        return model

    model = root()
    if cfg == config.static_int8("max"):
        calibrate(model, [X])
    source = save(tmp_path / "float", pure(model), how)
    shapes = nnx.eval_shape(root)
    for target in ("out", "out.safetensors"):
        checkpoint.convert_checkpoint(source, tmp_path / target, shapes, SAMPLE)
        loaded = checkpoint.load_serving(tmp_path / target, shapes)
        np.testing.assert_array_equal(call(loaded, X), call(convert(model, X), X))


def test_statistics_of_a_root_module_by_examples(tmp_path):
    def root():
        layer = nnx.Linear(*X.shape[-1:], 3, rngs=nnx.Rngs(0))
        return quantize_model(layer, config.static_int8("max"))

    model, shapes = root(), nnx.eval_shape(root)
    source = save(tmp_path / "float", pure(model))
    checkpoint.convert_checkpoint(
        source, tmp_path / "out", shapes, SAMPLE, calibrate=[X]
    )
    calibrate(model, [X])
    loaded = checkpoint.load_serving(tmp_path / "out", shapes)
    np.testing.assert_array_equal(call(loaded, X), call(convert(model, X), X))
