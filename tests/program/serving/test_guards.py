"""What one way of serving refuses, every way refuses, in the same words."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import errors as flax_errors
from flax import linen as nn
from flax import nnx, serialization

import aqtlite
from aqtlite import Rule, config, numerics
from aqtlite.flax import AqtEinsum, convert, quantize_model
from aqtlite.flax import nnx as aqtlite_nnx
from tests.common import normal
from tests.flax.support import init
from tests.program.serving.ways import (
    CFG,
    Function,
    Linen,
    Mlp,
    NnxInjected,
    NnxInPlace,
    NnxRules,
    Rules,
    X,
)

pytestmark = pytest.mark.code("quick")

OTHER = config.weight_only()
WAYS = (Linen, Rules, Function, NnxInjected, NnxRules, NnxInPlace)
every_way = pytest.mark.parametrize("way", WAYS)
CONVERTERS = {
    Linen: "aqtlite.flax.convert(",
    Rules: "aqtlite.flax.convert(",
    Function: "aqtlite.convert_function(",
    NnxInjected: "aqtlite.flax.nnx.convert(",
    NnxRules: "aqtlite.flax.nnx.convert(",
    NnxInPlace: "aqtlite.flax.nnx.convert(",
}


def refuses(way, variables, words):
    """Serving is refused in these words, eagerly and while it is compiled."""
    for run in (way.run, way.jit(way.run)):
        with pytest.raises(ValueError, match=f"^{words}") as raised:
            run(variables, X)
        text = str(raised.value)
        assert CONVERTERS[type(way)] in text or "leave the collection" in text


@pytest.mark.code("users")
@every_way
def test_what_is_trained_is_served(way):
    """Float variables without frozen weights are not refused."""
    way = way()
    floats = way.floats()
    trained = way.jit(way.run)(floats, X)
    served = way.jit(way.run)(way.convert(floats), X)
    np.testing.assert_array_equal(trained, served)


@every_way
def test_another_config(way):
    other = way(OTHER)
    frozen = way().frozen(way().convert(way().floats()))
    mixed = other.with_frozen(other.convert(other.floats()), frozen)
    words = (
        "the frozen weight 'up/kernel' was converted with another config than it is "
        r"called with\. Serve with the config of the conversion, .* again with .*: fwd"
    )
    refuses(other, mixed, words)


@every_way
@pytest.mark.parametrize("width", [15, 17])
def test_another_shape(way, width):
    other = way(width=width)
    frozen = other.frozen(other.convert(other.floats()))
    one = way()
    mixed = one.with_frozen(one.convert(one.floats()), frozen)
    words = (
        rf"the frozen weight 'up/kernel' was converted as rhs float32\[8,{width}\] and "
        r"is called as rhs float32\[8,16\]"
    )
    refuses(one, mixed, words)


@every_way
def test_floats_beside_frozen_weights(way):
    """Such as those of a later checkpoint: the old weights would be served."""
    way = way()
    serving = way.convert(way.floats(0))
    mixed = way.mixed(serving, way.floats(1))
    words = (
        r"parameter '(up|down)/kernel' is a float, but the weight that was frozen of"
    )
    refuses(way, mixed, words)


@every_way
@pytest.mark.parametrize("what", ["some", "all", "another model"])
def test_a_frozen_weight_that_is_missing(way, what):
    names = ("left", "right")
    way, other = way(), way(names=names)
    serving = way.convert(way.floats())
    frozen = {
        "some": {k: v for k, v in way.frozen(serving).items() if k != "up"},
        "all": {},
        "another model": other.frozen(other.convert(other.floats())),
    }[what]
    words = r"parameter '(up|down)/kernel' is frozen, but its frozen weight is missing "
    refuses(way, way.with_frozen(serving, frozen), words)


@pytest.mark.parametrize("way", [Linen, Rules])
def test_parameters_alone(way):
    way = way()
    params = way.convert(way.floats())["params"]
    words = r"parameter '(up|down)/kernel' is frozen, but its frozen weight is missing "
    refuses(way, {"params": params}, words)


@every_way
def test_scales_that_were_cast(way):
    way = way()
    cast = way.cast(way.convert(way.floats()))
    refuses(way, cast, "the scale of the frozen weight 'up/kernel' is bfloat16, but")


INT4 = config.update(CFG, {"fwd.rhs.numerics": numerics.IntSymmetric(bits=4)})


@every_way
def test_restored_by_orbax_with_another_config(way, tmp_path):
    """Which would cast the integers."""
    one, other = way(), way(INT4)
    serving = one.convert(one.floats())
    variables = nnx.state(serving) if isinstance(serving, nnx.Module) else serving
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "serving", variables)

    def restore(way):
        wanted = way.convert(way.floats())
        is_nnx = isinstance(wanted, nnx.Module)
        variables = nnx.state(wanted) if is_nnx else wanted
        with ocp.StandardCheckpointer() as checkpointer:
            abstract = jax.eval_shape(lambda: variables)
            found = checkpointer.restore(tmp_path / "serving", abstract)
        return nnx.merge(nnx.graphdef(wanted), found) if is_nnx else found

    np.testing.assert_array_equal(one.run(restore(one), X), one.run(serving, X))
    with pytest.raises(ValueError, match="recipe.*of_config_"):
        restore(other)


@pytest.mark.parametrize("way", [Linen, Rules])
def test_restored_by_flax_with_another_config(way):
    one, other = way(), way(INT4)
    serving = one.convert(one.floats())
    saved = serialization.to_bytes(serving)
    found = serialization.from_bytes(serving, saved)
    np.testing.assert_array_equal(one.run(found, X), one.run(serving, X))
    with pytest.raises(ValueError, match="'kernel' was saved with another config"):
        serialization.from_bytes(other.convert(other.floats()), saved)


def test_saved_without_a_recipe():
    """As serving variables were before they had one."""
    way = Linen()
    serving = way.convert(way.floats())
    state = serialization.to_state_dict(serving)
    for entries in state["aqt"].values():
        entries["kernel"]["site"] = {}
    found = serialization.from_state_dict(serving, state)
    np.testing.assert_array_equal(way.run(found, X), way.run(serving, X))


def restored(tree, how, path):
    """A tree that was saved, and restored without a target."""
    if how == "msgpack":
        return serialization.msgpack_restore(serialization.to_bytes(tree))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path)


@pytest.mark.parametrize(
    ("way", "how"), [(Rules, "orbax"), (Rules, "msgpack"), (Function, "orbax")]
)
def test_restored_without_a_target(way, how, tmp_path):
    way = way()
    serving = way.convert(way.floats())
    found = restored(serving, how, tmp_path / "serving")
    for run in (way.run, way.jit(way.run)):
        with pytest.raises(ValueError, match="record of its contraction: serving var"):
            run(found, X)


def test_restored_without_a_target_in_linen(tmp_path):
    """Orbax gives markers in place of parameters, which Flax refuses itself."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.normal(), (8, 4))
            return AqtEinsum(CFG)("bk,kn->bn", x, w)

    serving = convert(Model(), init(Model(), X), X)
    errors = TypeError, ValueError, flax_errors.ScopeParamShapeError
    texts = {"orbax": r'"w" .* has shape \(\)', "msgpack": "without a target"}
    for how, words in texts.items():
        found = restored(serving, how, tmp_path / "serving")
        for run in (Model().apply, jax.jit(Model().apply)):
            with pytest.raises(errors, match=words):
                run(found, X)


@pytest.mark.parametrize("way", [NnxInjected, NnxRules])
def test_restored_without_a_target_in_nnx(way, tmp_path):
    way = way()
    serving = way.convert(way.floats())
    found = restored(nnx.state(serving), "orbax", tmp_path / "serving")
    nnx.update(serving, found)
    with pytest.raises(ValueError, match="record of its contraction: serving var"):
        way.run(serving, X)


@every_way
def test_the_gradient_of_what_is_frozen(way):
    """It would be that of the lookup alone."""
    way = way()
    gradient, argument = way.loss_of(way.converted_tied(), "embed")
    words = (
        r"a gradient was asked with respect to parameters of which the weight "
        r"'embed[/.]embedding' is frozen"
    )
    for run in (gradient, way.jit(gradient)):
        with pytest.raises(TypeError, match=words):
            run(argument)


@every_way
def test_the_gradient_of_what_is_left(way):
    way = way()
    gradient, argument = way.loss_of(way.converted_tied(), "bias")
    for run in (gradient, way.jit(gradient)):
        (leaf,) = jax.tree.leaves(run(argument))
        assert leaf.shape == (8,) and np.asarray(leaf).any()


@every_way
@pytest.mark.parametrize("row", [0, 5])
def test_other_values_of_what_is_left(way, row):
    """One row of an embedding was trained, and its frozen weight would be stale."""
    way = way()
    serving = way.converted_tied()
    served = way.run_tied(serving)
    np.testing.assert_array_equal(way.jit(way.run_tied)(serving), served)
    trained = way.with_embedding(serving, lambda x: x.at[row].add(1e-3))
    words = "parameter that the frozen weight 'embed[./]embedding' was made of stays"
    with pytest.raises(ValueError, match=words) as raised:
        way.run_tied(trained)
    assert CONVERTERS[type(way)] in str(raised.value)
    assert np.isnan(way.jit(way.run_tied)(trained)).all()


@every_way
def test_converted_without_samples(way):
    """As frozen weights were before they had them: less is compared, or nothing."""
    way = way()
    serving = way.converted_tied()
    served = way.run_tied(serving)
    np.testing.assert_array_equal(way.run_tied(way.without_sample(serving)), served)


@pytest.mark.parametrize("way", [Rules, Function, NnxRules])
def test_a_frozen_parameter_that_is_read_in_float(way):
    """By another call than the one that was converted: no NaN gets through."""
    readers = {
        Rules: _linen_reader,
        Function: _function_reader,
        NnxRules: _nnx_reader,
    }
    run = readers[way]()
    words = "^parameter 'kernel' is frozen, but this call reads it in float"
    with pytest.raises(ValueError, match=words):
        run(True)
    assert np.isfinite(run(False)).all()


class Reader(nn.Module):
    @nn.compact
    def __call__(self, x, norm):
        kernel = self.param("kernel", nn.initializers.normal(), (8, 4))
        return x @ kernel + (jnp.sum(kernel**2) if norm else 0)


def _linen_reader():
    model = quantize_model(Reader(), CFG)
    serving = convert(model, init(model, X, False), X, False)
    return functools.partial(model.apply, serving, X)


def _function_reader():
    def function(params, x, norm):
        kernel = params["kernel"]
        return x @ kernel + (jnp.sum(kernel**2) if norm else 0)

    quantized = aqtlite.quantize_function(function, CFG, params=0)
    params = {"kernel": normal((8, 4))}
    serve, serving = aqtlite.convert_function(quantized, params, X, False)
    return functools.partial(serve, serving, X)


def _nnx_reader():
    class Reader(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(normal((8, 4)))

        def __call__(self, x, norm):
            kernel = self.kernel[...]
            return x @ kernel + (jnp.sum(kernel**2) if norm else 0)

    model = aqtlite_nnx.quantize_model(Reader(), CFG)
    return functools.partial(aqtlite_nnx.convert(model, X, False), X)


MOVED = r"'[^']+' is number \d+ of the parameters, but .* was number \d+"


@pytest.mark.parametrize("order", [(1, 0, 2), (1, 2), (2, 2, 2)], ids=str)
def test_layers_that_were_moved(order):
    """The frozen weights are found by place, and would stay where they were."""
    layers = [normal((8, 8), seed) for seed in range(3)]

    def mlp(layers, x):
        for w in layers:
            x = jnp.tanh(x @ w)
        return x

    quantized = aqtlite.quantize_function(mlp, CFG, params=0)
    serve, serving = aqtlite.convert_function(quantized, layers, X)
    params = [serving["params"][i] for i in order]
    with pytest.raises(ValueError, match=MOVED):
        serve({**serving, "params": params}, X)


def test_layers_of_nnx_that_were_swapped():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs))
    quantized = aqtlite_nnx.quantize_model(model, [Rule(cfg=CFG)])
    serving = aqtlite_nnx.convert(quantized, X)
    serving.layers = nnx.List(serving.layers[::-1])
    with pytest.raises(ValueError, match=MOVED):
        serving(X)


def test_layers_of_linen_that_were_swapped():
    model = quantize_model(Mlp(names=("a", "b"), width=4), [Rule(cfg=CFG)])
    x = X[:, :4]
    variables = init(model.model, x)
    serving = convert(model, variables, x)
    a, b = serving["params"]["a"], serving["params"]["b"]
    with pytest.raises(ValueError, match=MOVED):
        model.apply({**serving, "params": {"a": b, "b": a}}, x)
