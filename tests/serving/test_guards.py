"""What one way of serving refuses, every way refuses, in the same words."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx, serialization

import aqtlite
from aqtlite import Rule, config
from aqtlite.flax import AqtDotGeneral, AqtEinsum, convert, quantize_model
from aqtlite.flax import nnx as aqtlite_nnx
from tests.common import normal

CFG = config.fully_quantized(use_stochastic_rounding=False)
OTHER = config.weight_only()
X = normal((4, 8))
TOKENS = jnp.array([3, 1, 2])
SUM = "...k,nk->...n"


class Mlp(nn.Module):
    dot_general: object = None
    names: tuple[str, str] = ("up", "down")
    width: int = 16

    @nn.compact
    def __call__(self, x):
        up, down = self.names
        x = nn.Dense(self.width, dot_general=self.dot_general, name=up)(x)
        return nn.Dense(4, dot_general=self.dot_general, name=down)(nn.relu(x))


class Tied(nn.Module):
    """An embedding that is looked up in float, and contracted."""

    einsum: object = jnp.einsum

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(8, 4, name="embed")
        bias = self.param("bias", nn.initializers.zeros, (8,))
        return self.einsum(SUM, embed(tokens), embed.embedding) + bias


class Linen:
    """A Linen model with injected functions."""

    def __init__(self, cfg=CFG, names=("up", "down"), width=16):
        self.model = Mlp(AqtDotGeneral(cfg), names, width)
        self.tied = Tied(AqtEinsum(cfg))

    def floats(self, seed=0):
        return self.model.init(jax.random.key(seed), X)

    def convert(self, floats):
        return convert(self.model, floats, X)

    def run(self, variables, x):
        return self.model.apply(variables, x)

    jit = staticmethod(jax.jit)

    def mixed(self, serving, floats):
        return {**serving, "params": floats["params"]}

    def frozen(self, serving):
        return serving["aqt"]

    def with_frozen(self, serving, frozen):
        return {**serving, "aqt": frozen}

    def cast(self, serving):
        return jax.tree.map(_half, serving)

    def converted_tied(self):
        variables = self.tied.init(jax.random.key(0), TOKENS)
        return convert(self.tied, variables, TOKENS)

    def loss_of(self, serving, select):
        """A loss of some of the parameters that are left, and these parameters."""

        def loss(chosen):
            params = {**serving["params"], **chosen}
            return (self.tied.apply({**serving, "params": params}, TOKENS) ** 2).sum()

        return jax.grad(loss), {select: serving["params"][select]}


class Rules(Linen):
    """A Linen model by rules."""

    def __init__(self, cfg=CFG, names=("up", "down"), width=16):
        self.model = quantize_model(Mlp(None, names, width), cfg)
        self.tied = quantize_model(Tied(), [Rule(operands="weight", cfg=cfg)])


class Function(Linen):
    """A function by rules."""

    def __init__(self, cfg=CFG, names=("up", "down"), width=16):
        self.names, self.width = names, width
        self.function = aqtlite.quantize_function(self._mlp, cfg, params=0)
        rules = [Rule(operands="weight", cfg=cfg)]
        self.tied = aqtlite.quantize_function(self._tied, rules, params=0)

    def _mlp(self, params, x):
        up, down = (params[name] for name in self.names)
        with jax.named_scope(self.names[0]):
            x = jax.nn.relu(x @ up["kernel"] + up["bias"])
        with jax.named_scope(self.names[1]):
            return x @ down["kernel"] + down["bias"]

    @staticmethod
    def _tied(params, tokens):
        table = params["embed"]["embedding"]
        return jnp.einsum(SUM, table[tokens], table) + params["bias"]

    def floats(self, seed=0):
        return Mlp(None, self.names, self.width).init(jax.random.key(seed), X)["params"]

    def convert(self, floats):
        return aqtlite.convert_function(self.function, floats, X)[1]

    def run(self, variables, x):
        if "aqt" not in variables:
            return self.function(variables, x)
        serve, _ = aqtlite.convert_function(self.function, self.floats(), X)
        return serve(variables, x)

    def mixed(self, serving, floats):
        return {**serving, "params": floats}

    def converted_tied(self):
        params = Tied().init(jax.random.key(0), TOKENS)["params"]
        self.serve_tied, serving = aqtlite.convert_function(self.tied, params, TOKENS)
        return serving

    def loss_of(self, serving, select):
        def loss(chosen):
            params = {**serving["params"], **chosen}
            return (self.serve_tied({**serving, "params": params}, TOKENS) ** 2).sum()

        return jax.grad(loss), {select: serving["params"][select]}


class NnxMlp(nnx.Module):
    def __init__(self, names, width, rngs, **kwargs):
        self.names = names
        setattr(self, names[0], nnx.Linear(8, width, rngs=rngs, **kwargs))
        setattr(self, names[1], nnx.Linear(width, 4, rngs=rngs, **kwargs))

    def __call__(self, x):
        up, down = (getattr(self, name) for name in self.names)
        return down(nnx.relu(up(x)))


class NnxTied(nnx.Module):
    def __init__(self, rngs, dot_general=jax.lax.dot_general):
        self.embed = aqtlite_nnx.AqtEmbed(8, 4, dot_general=dot_general, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(8))

    def __call__(self, tokens):
        return self.embed.attend(self.embed(tokens)) + self.bias[...]


class NnxInjected:
    """An NNX model with injected functions."""

    def __init__(self, cfg=CFG, names=("up", "down"), width=16):
        self.cfg, self.names, self.width = cfg, names, width

    def floats(self, seed=0):
        dot_general = aqtlite_nnx.AqtDotGeneral(self.cfg)
        rngs = nnx.Rngs(seed)
        return NnxMlp(self.names, self.width, rngs, dot_general=dot_general)

    def convert(self, floats):
        return aqtlite_nnx.convert(floats, X)

    def run(self, model, x):
        return model(x)

    jit = staticmethod(nnx.jit)

    def mixed(self, serving, floats):
        nnx.update(serving, nnx.state(floats, nnx.Param))
        return serving

    def frozen(self, serving):
        return serving.aqt.frozen

    def with_frozen(self, serving, frozen):
        serving.aqt.frozen = nnx.data(frozen)
        return serving

    def cast(self, serving):
        nnx.update(serving, jax.tree.map(_half, nnx.state(serving)))
        return serving

    def converted_tied(self):
        dot_general = aqtlite_nnx.AqtDotGeneral(self.cfg)
        return aqtlite_nnx.convert(NnxTied(nnx.Rngs(0), dot_general), TOKENS)

    def loss_of(self, serving, select):
        def is_selected(path, x):
            return isinstance(x, nnx.Param) and select in path

        wrt = nnx.DiffState(0, is_selected)
        return nnx.grad(lambda m: (m(TOKENS) ** 2).sum(), argnums=wrt), serving


class NnxRules(NnxInjected):
    """An NNX model by rules."""

    def floats(self, seed=0):
        model = NnxMlp(self.names, self.width, nnx.Rngs(seed))
        return aqtlite_nnx.quantize_model(model, self.cfg)

    def converted_tied(self):
        rules = [Rule(operands="weight", cfg=self.cfg)]
        model = aqtlite_nnx.quantize_model(NnxTied(nnx.Rngs(0)), rules)
        return aqtlite_nnx.convert(model, TOKENS)


def _half(x):
    return x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x


WAYS = (Linen, Rules, Function, NnxInjected, NnxRules)
every_way = pytest.mark.parametrize("way", WAYS)
CONVERTERS = {
    Linen: "aqtlite.flax.convert(",
    Rules: "aqtlite.flax.convert(",
    Function: "aqtlite.convert_function(",
    NnxInjected: "aqtlite.flax.nnx.convert(",
    NnxRules: "aqtlite.flax.nnx.convert(",
}


def refuses(way, variables, words):
    """Serving is refused in these words, eagerly and while it is compiled."""
    for run in (way.run, way.jit(way.run)):
        with pytest.raises(ValueError, match=f"^{words}") as raised:
            run(variables, X)
        text = str(raised.value)
        assert CONVERTERS[type(way)] in text or "leave the collection" in text


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
    words = "the frozen weight 'up/kernel' was converted with another config than it"
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
    """Where Flax's own layers do not fail before they contract."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.normal(), (8, 4))
            return AqtEinsum(CFG)("bk,kn->bn", x, w)

    serving = convert(Model(), Model().init(jax.random.key(0), X), X)
    for how in ("orbax", "msgpack"):
        found = restored(serving, how, tmp_path / "serving")
        for run in (Model().apply, jax.jit(Model().apply)):
            with pytest.raises((TypeError, ValueError), match="without a target"):
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
    serving = convert(model, model.init(jax.random.key(0), X, False), X, False)
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
