"""Nothing that is frozen is differentiated, and what is left in float trains."""

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx, serialization

import aqtlite
from aqtlite import Rule, config
from aqtlite.checkpoint import convert_checkpoint, load_serving
from aqtlite.flax import AqtDotGeneral, convert, quantize_model
from aqtlite.flax import nnx as aqtlite_nnx
from aqtlite.program.serving.placeholder import is_placeholder, without_markers
from tests.checkpoint.support import save
from tests.common import normal, quick_jit
from tests.flax.support import init

# Bits tell which arrays were stored, and a loss that it falls.
pytestmark = pytest.mark.code("quick")

CFG = config.weight_only()
X = normal((4, 8))
LAYERS = ("base", "lora_a", "lora_b")
ADAPTERS = LAYERS[1:]


class Adapted(nn.Module):
    dot_generals: tuple[object, object] = (None, None)

    @nn.compact
    def __call__(self, x):
        base, adapter = self.dot_generals
        y = nn.Dense(8, dot_general=base, name="base")(x)
        down = nn.Dense(2, use_bias=False, dot_general=adapter, name="lora_a")
        up = nn.Dense(8, use_bias=False, dot_general=adapter, name="lora_b")
        return y + up(down(x))


class NnxAdapted(nnx.Module):
    def __init__(self, base=jax.lax.dot_general, adapter=jax.lax.dot_general):
        rngs = nnx.Rngs(0)
        self.base = nnx.Linear(8, 8, dot_general=base, rngs=rngs)
        given = {"use_bias": False, "dot_general": adapter, "rngs": rngs}
        self.lora_a = nnx.Linear(8, 2, **given)
        self.lora_b = nnx.Linear(2, 8, **given)

    def __call__(self, x):
        return self.base(x) + self.lora_b(self.lora_a(x))


def _rules(cfg):
    return [Rule(path=".*lora.*", cfg=cfg), Rule(cfg=CFG)]


def _of_linen(model):
    serving = convert(model, init(model, X), X)
    return serving["params"], lambda p: model.apply({**serving, "params": p}, X)


def injected_linen(cfg):
    return _of_linen(Adapted((AqtDotGeneral(CFG), AqtDotGeneral(cfg))))


def linen_rules(cfg):
    return _of_linen(quantize_model(Adapted(), _rules(cfg)))


def function_rules(cfg):
    def function(params, x):
        base, a, b = (params[name] for name in LAYERS)
        y = x @ base["kernel"] + base["bias"]
        with jax.named_scope("lora"):
            return y + x @ a["kernel"] @ b["kernel"]

    params = init(Adapted(), X)["params"]
    function = aqtlite.quantize_function(function, _rules(cfg), params=0)
    serve, serving = aqtlite.convert_function(function, params, X)
    return serving["params"], lambda p: serve({**serving, "params": p}, X)


def _of_nnx(model):
    graphdef, params, others = nnx.split(aqtlite_nnx.convert(model, X), nnx.Param, ...)
    return dict(params), lambda p: nnx.merge(graphdef, nnx.State(p), others)(X)


def injected_nnx(cfg):
    functions = aqtlite_nnx.AqtDotGeneral(CFG), aqtlite_nnx.AqtDotGeneral(cfg)
    return _of_nnx(NnxAdapted(*functions))


def nnx_rules(cfg):
    return _of_nnx(aqtlite_nnx.quantize_model(NnxAdapted(), _rules(cfg)))


every_way = pytest.mark.parametrize(
    "way", [injected_linen, linen_rules, function_rules, injected_nnx, nnx_rules]
)
DIFFERENTIATED = {
    "eager": jax.grad,
    "compiled": lambda loss: quick_jit(jax.grad(loss)),
    "a compiled loss": lambda loss: jax.grad(quick_jit(loss)),
    "rematerialized": lambda loss: jax.grad(jax.checkpoint(loss)),
    "pulled back": lambda loss: lambda p: jax.vjp(loss, p),
    "linearized": lambda loss: lambda p: jax.linearize(loss, p),
}


def _loss_of(names, params, run):
    """A loss of some layers, and their parameters."""
    chosen = {name: params[name] for name in names}
    return lambda chosen: (run({**params, **chosen}) ** 2).mean(), chosen


@every_way
def test_adapters_that_were_frozen_by_mistake(way):
    params, run = way(CFG)
    for names, word in ((ADAPTERS, "lora_[ab]"), (LAYERS, "(base|lora_[ab])")):
        loss, chosen = _loss_of(names, params, run)
        for differentiated in DIFFERENTIATED.values():
            with pytest.raises(TypeError, match=f"'{word}/kernel', which is frozen"):
                differentiated(loss)(chosen)


@every_way
def test_adapters_beside_a_frozen_kernel(way):
    params, run = way(None)
    loss, chosen = _loss_of(ADAPTERS, params, run)
    gradient = jax.grad(loss)(chosen)
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradient))
    optimizer = optax.adam(3e-2)

    @quick_jit
    def step(chosen, state):
        value, gradient = jax.value_and_grad(loss)(chosen)
        updates, state = optimizer.update(gradient, state)
        return value, optax.apply_updates(chosen, updates), state

    state, values = optimizer.init(chosen), []
    for _ in range(8):
        value, chosen, state = step(chosen, state)
        values.append(value)
    assert values[-1] < 0.9 * values[0]


@every_way
def test_what_is_left_in_float(way):
    """All of it, told apart by `is_frozen`; the frozen kernel's marker is not asked."""
    params, run = way(None)
    base = params["base"]
    floats = {k: v for k, v in base.items() if not aqtlite.is_frozen(v)}
    assert floats.keys() == {"bias"} and base.keys() == {"bias", "kernel"}

    def loss(floats):
        return (run({**params, "base": type(base)({**base, **floats})}) ** 2).mean()

    for differentiated in (jax.grad, DIFFERENTIATED["compiled"]):
        (leaf,) = jax.tree.leaves(differentiated(loss)(floats))
        assert leaf.shape == (8,) and np.asarray(leaf).all()


def test_nnx_trains_what_is_left_in_float():
    model = aqtlite_nnx.quantize_model(NnxAdapted(), CFG)
    serving = aqtlite_nnx.convert(model, X)

    def in_float(path, x):
        return isinstance(x, nnx.Param) and not aqtlite.is_frozen(x)

    def loss(model):
        return (model(X) ** 2).mean()

    for wrap in (lambda function: function, nnx.jit):
        with pytest.raises(TypeError, match="'base/kernel', which is frozen"):
            wrap(nnx.grad(loss))(serving)
    optimizer = nnx.Optimizer(serving, optax.sgd(0.1), wrt=in_float)
    gradient = nnx.jit(nnx.grad(loss, argnums=nnx.DiffState(0, in_float)))(serving)
    optimizer.update(serving, gradient)
    assert np.asarray(serving.base.bias[...]).all()


@pytest.mark.code("users")
@every_way
def test_the_compiled_program_computes_nothing_of_markers(way):
    params, run = way(CFG)
    costs = [
        jax.jit(run).lower(tree).compile().cost_analysis()
        for tree in (params, without_markers(params))
    ]
    assert costs[0] == costs[1]
    assert len(jax.tree.leaves(params)) == len(jax.tree.leaves(init(Adapted(), X)))


class Stacked(nn.Module):
    """Layers that Flax slices along the first axis of their kernels, and another."""

    axis: int = -1

    @nn.compact
    def __call__(self, x):
        def body(layer, x, _):
            return layer(x), None

        def layer(name):
            return nn.Dense(8, dot_general=AqtDotGeneral(CFG), name=name)

        scan = nn.scan(
            body,
            variable_axes={"params": 0, "aqt": 0},
            split_rngs={"params": True},
            length=3,
        )
        x, _ = scan(layer("scanned"), x, None)
        vmap = nn.vmap(
            lambda layer, x: layer(x),
            variable_axes={"params": self.axis, "aqt": self.axis},
            split_rngs={"params": True},
            in_axes=None,
            axis_size=2,
        )
        return vmap(layer("mapped"), x).sum(0)


MODEL = Stacked()
APPLY = jax.jit(MODEL.apply)


@pytest.fixture(scope="module")
def stacked():
    variables = init(MODEL, X)
    return variables, convert(MODEL, variables, X)


def check_refused(serving, model=MODEL):
    """Refuses the gradient of each kernel."""
    params = serving["params"]
    for name in ("scanned", "mapped"):

        def loss(kernel, name=name):
            layers = {**params, name: {**params[name], "kernel": kernel}}
            return model.apply({**serving, "params": layers}, X).sum()

        with pytest.raises(TypeError, match=f"'{name}/kernel', which is frozen"):
            jax.jit(jax.grad(loss))(params[name]["kernel"])


def test_markers_are_sliced_with_their_parameters(stacked):
    variables, serving = stacked
    params = serving["params"]
    assert params["scanned"]["kernel"].marker.shape == (3, 1, 1)
    assert params["mapped"]["kernel"].marker.shape == (1, 1, 2)
    np.testing.assert_array_equal(APPLY(serving, X), APPLY(variables, X))
    check_refused(serving)


@pytest.mark.parametrize("with_model", [True, False])
def test_loaded(with_model, tmp_path):
    model = Stacked(0)
    variables = init(model, X)
    source = save(tmp_path / "float", variables, "safetensors")
    convert_checkpoint(source, tmp_path / "out", model, X)
    loaded = load_serving(tmp_path / "out", model if with_model else None)
    wanted = convert(model, variables, X)
    jax.tree.map(np.testing.assert_array_equal, loaded, wanted)
    check_refused(loaded, model)


def test_restored(stacked, tmp_path):
    variables, serving = stacked
    saved = serialization.to_bytes(serving)
    check_refused(serialization.from_bytes(serving, saved))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "new", serving)
        checkpointer.save(tmp_path / "old", without_markers(serving))
    shapes = jax.eval_shape(lambda v: convert(MODEL, v, X), variables)
    with ocp.StandardCheckpointer() as checkpointer:
        check_refused(checkpointer.restore(tmp_path / "new", shapes))
        old = checkpointer.restore(tmp_path / "old", without_markers(shapes))
    np.testing.assert_array_equal(APPLY(old, X), APPLY(serving, X))


def test_as_shapes():
    """Of a model that is no arrays, markers are shapes."""
    model = nnx.eval_shape(lambda: aqtlite_nnx.quantize_model(NnxAdapted(), CFG))
    params = nnx.state(aqtlite_nnx.convert(model, X), nnx.Param)
    for leaf in jax.tree.leaves(params, is_leaf=is_placeholder):
        marker = leaf.marker if is_placeholder(leaf) else leaf
        assert isinstance(marker, jax.ShapeDtypeStruct)
