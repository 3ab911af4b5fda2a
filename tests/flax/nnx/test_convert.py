"""Serving models: what is trained is what is served, and no float kernel is left."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import aqtlite
from aqtlite import Rule, config, make_dot_general
from aqtlite.flax import AqtDotGeneral
from aqtlite.flax.nnx import (
    Call,
    Frozen,
    calibrate,
    convert,
    convert_in_place,
    quantize_model,
)
from tests.flax.nnx.models import (
    CFG,
    TOKENS,
    Mlp,
    Scanned,
    Stacked,
    Transformer,
    X,
    call,
)

pytestmark = pytest.mark.code("quick")


@pytest.fixture(scope="module")
def model():
    return quantize_model(Mlp(nnx.Rngs(0)), CFG)


@pytest.fixture(scope="module")
def serving(model):
    return convert(model, X)


def assert_equal(one, other, *args):
    np.testing.assert_array_equal(call(one, *args), call(other, *args))


@pytest.mark.code("users")
class TestServing:
    def test_equals_training(self, model, serving):
        assert_equal(serving, model, X)

    def test_has_integers_in_place_of_kernels(self, serving):
        params = nnx.to_flat_state(nnx.state(serving, nnx.Param))
        floats = [x for _, x in params if not aqtlite.is_frozen(x)]
        assert sorted(x.shape for x in floats) == [(4,), (16,)]
        frozen = serving.aqt.frozen["up"]["kernel"].get_value()
        assert frozen.shape == (8, 16)
        assert frozen.qvalue.dtype == jnp.int8

    def test_the_model_stays(self, model, serving):
        del serving
        assert model.up.kernel.shape == (8, 16)
        assert not model.aqt.frozen

    def test_serves_other_shapes_and_methods(self, model, serving):
        assert_equal(serving, model, X[:1])
        np.testing.assert_array_equal(
            nnx.jit(lambda m: m.hidden(X))(serving),
            nnx.jit(lambda m: m.hidden(X))(model),
        )

    def test_is_split_and_merged_by_type(self, model, serving):
        graphdef, params, frozen = nnx.split(serving, nnx.Param, Frozen)
        assert len(jax.tree.leaves(frozen)) == 4
        assert_equal(nnx.merge(graphdef, params, frozen), model, X)

    @pytest.mark.slow
    def test_a_transformer_with_all_that_it_changes(self):
        """Batch statistics, rngs, a tied embedding, and integers in attention."""
        model = quantize_model(Transformer(nnx.Rngs(0), 1), CFG)
        serving = convert(model, TOKENS)
        for _ in range(2):
            assert_equal(serving, model, TOKENS)
        assert serving.blocks[0].dropout.rngs.count[...] == 2
        # The table is looked up, and stays.
        assert serving.embed.embedding.shape == (16, 8)

    def test_scanned_layers(self):
        model = quantize_model(Scanned(nnx.Rngs(0)), CFG)
        serving = convert(model, X, strict=True)
        assert_equal(serving, model, X)
        assert aqtlite.is_frozen(serving.layers.kernel)
        assert serving.aqt.frozen["layers"]["kernel"].qvalue.shape == (3, 8, 8)

    def test_layers_that_are_scanned_by_another_axis(self):
        """MaxText's: kernels are stacked along axis 1, and written back by the call."""
        model = quantize_model(Stacked(nnx.Rngs(0)), CFG)
        serving = convert(model, X, strict=True)
        assert_equal(serving, model, X)
        assert aqtlite.is_frozen(serving.layers.kernel)
        assert serving.layers.bias.shape == (8, 3)

    def test_decoding_with_a_cache(self):
        attention = nnx.MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(0))
        attention.init_cache((1, 4, 8))
        model = quantize_model(attention, CFG)
        serving = convert(model, X[None, :1])
        for i in range(2):
            assert_equal(serving, model, X[None, i : i + 1])
        assert serving.cache_index[...] == 2

    def test_in_half_precision(self):
        model = quantize_model(
            nnx.Linear(8, 4, dtype="bfloat16", rngs=nnx.Rngs(0)), CFG
        )
        assert_equal(convert(model, X), model, X)


class TestConversion:
    def test_in_place_takes_the_floats_of_all_who_share_them(self):
        inner = Mlp(nnx.Rngs(0))
        model = quantize_model(inner, CFG)
        expected = call(model, X)
        assert convert_in_place(model, X) is model
        np.testing.assert_array_equal(call(model, X), expected)
        assert aqtlite.is_frozen(inner.up.kernel)

    def test_of_shapes_and_a_checkpoint(self, model, serving, tmp_path):
        def make():
            return convert(quantize_model(Mlp(nnx.Rngs(0)), CFG), X)

        graphdef, shapes = nnx.split(nnx.eval_shape(make))
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "serving", nnx.state(serving))
        with ocp.StandardCheckpointer() as checkpointer:
            state = checkpointer.restore(tmp_path / "serving", shapes)
        assert_equal(nnx.merge(graphdef, state), model, X)

    def test_of_an_abstract_model(self, serving):
        abstract = nnx.eval_shape(lambda: quantize_model(Mlp(nnx.Rngs(0)), CFG))
        found = convert(abstract, jax.ShapeDtypeStruct(X.shape, X.dtype))
        shapes, expected = (
            jax.tree.map(jnp.shape, nnx.state(one, Frozen)) for one in (found, serving)
        )
        assert shapes == expected

    def test_under_vmap(self):
        keys = jax.random.split(jax.random.key(0), 2)
        models = nnx.vmap(lambda key: quantize_model(Mlp(nnx.Rngs(key)), CFG))(keys)
        serving = nnx.vmap(lambda model: convert(model, X))(models)
        run = nnx.jit(nnx.vmap(lambda model: model(X)))
        np.testing.assert_array_equal(run(serving), run(models))

    def test_reports(self, model):
        reports = []
        convert(model, X, report=reports.append)
        assert "up/kernel" in str(reports[0])

    def test_an_adapter_beside_a_frozen_kernel(self):
        layer = nnx.LoRALinear(8, 8, lora_rank=2, rngs=nnx.Rngs(0))
        model = quantize_model(
            nnx.Sequential(layer), [Rule(path="layers/0", cfg=config.weight_only())]
        )
        serving = convert(model, X)
        assert_equal(serving, model, X)
        trained = nnx.state(serving, nnx.LoRAParam)
        assert len(jax.tree.leaves(trained)) == 2


class Pair(nnx.Module):
    """Two methods, each of which reads a parameter that the other does not."""

    def __init__(self, rngs, **kwargs):
        self.encoder = nnx.Linear(8, 8, rngs=rngs, **kwargs)
        self.decoder = nnx.Linear(8, 4, rngs=rngs)
        self.unread = nnx.Linear(8, 4, rngs=rngs)

    def encode(self, x):
        return self.encoder(x)

    def decode(self, x, *, double=False):
        x = self.decoder(self.encoder(x))
        return 2 * x if double else x


RULES = [Rule(path="(en|de)coder", cfg=CFG)]
DECODE = Call(X[:1], method="decode", double=True)


class TestCalls:
    @pytest.fixture(scope="class")
    def pair(self):
        return quantize_model(Pair(nnx.Rngs(0)), RULES)

    def test_what_any_of_them_contracts_is_frozen(self, pair):
        reports = []
        calls = [Call(X, method="encode"), DECODE]
        serving = convert(pair, calls=calls, strict=True, report=reports.append)
        assert sorted(serving.aqt.frozen) == ["decoder", "encoder"]
        assert "unread (2)" in str(reports[0])
        for run in (
            nnx.jit(lambda model: model.encode(X)),
            nnx.jit(lambda model: model.decode(X[:1], double=True)),
        ):
            np.testing.assert_array_equal(run(serving), run(pair))

    def test_one_call_freezes_what_it_contracts(self, pair):
        serving = convert(pair, X, method="encode")
        assert sorted(serving.aqt.frozen) == ["encoder"]
        assert serving.decoder.kernel.shape == (8, 4)

    def test_in_place_with_statistics(self):
        static = config.static_int8()
        model = quantize_model(Pair(nnx.Rngs(0)), static)
        model.eval()
        calibrate(model, [X], method="decode")
        run = nnx.jit(lambda model: (model.encode(X), model.decode(X)))
        expected = run(model)
        calls = [Call(X, method="encode"), Call(X, method="decode")]
        assert convert_in_place(model, calls=calls) is model
        jax.tree.map(np.testing.assert_array_equal, run(model), expected)

    def test_wrong_calls(self, pair):
        with pytest.raises(TypeError, match="not both"):
            convert(pair, X, calls=[DECODE])
        with pytest.raises(TypeError, match="not both"):
            convert(pair, method="encode", calls=[DECODE])
        with pytest.raises(TypeError, match="list of aqtlite.flax.Call"):
            convert(pair, calls=[X])


class TestForeignFunctions:
    """Those that quantize, and whose weights NNX cannot freeze."""

    @pytest.fixture(scope="class", params=["AqtDotGeneral", "make_dot_general"])
    def mixed(self, request):
        foreign = {
            "AqtDotGeneral": AqtDotGeneral(CFG),
            "make_dot_general": make_dot_general(CFG),
        }[request.param]
        model = Pair(nnx.Rngs(0), dot_general=foreign)
        return quantize_model(model, [Rule(path="decoder", cfg=CFG)])

    def test_are_named_in_the_report(self, mixed):
        reports = []
        serving = convert(mixed, calls=[DECODE], report=reports.append)
        (left,) = reports[0].stayed_float
        assert left.path == "encoder/kernel"
        assert "quantizes on its own" in str(reports[0])
        run = nnx.jit(lambda model: model.decode(X))
        np.testing.assert_array_equal(run(serving), run(mixed))

    def test_are_refused_by_strict(self, mixed):
        with pytest.raises(ValueError, match=r"encoder/kernel: .*aqtlite\.flax\.nnx"):
            convert(mixed, calls=[DECODE], strict=True)


class TestRefusals:
    def test_a_model_that_is_converted(self, serving):
        with pytest.raises(ValueError, match="converted already"):
            convert(serving, X)

    def test_a_model_in_float(self):
        with pytest.raises(ValueError, match="no rule names a contraction"):
            convert(Mlp(nnx.Rngs(0)), X)

    def test_functions_of_linen(self):
        model = Mlp(nnx.Rngs(0), dot_general=AqtDotGeneral(CFG))
        with pytest.raises(ValueError, match="inject those of aqtlite.flax.nnx"):
            convert(model, X)

    def test_a_weight_of_another_call(self, serving):
        class Transposed(Mlp):
            def __call__(self, x):
                return x @ self.up.kernel[...][:, ::-1]

        other = quantize_model(Transposed(nnx.Rngs(0)), CFG)
        other.aqt = nnx.clone(serving).aqt
        nnx.update(other, nnx.state(serving))
        with pytest.raises(ValueError, match="'up/kernel' is frozen, but the rhs"):
            other(X)

    def test_a_frozen_parameter_on_its_own(self, serving):
        with pytest.raises(TypeError, match="is frozen, and has no values here: call"):
            serving.up.kernel[...]
