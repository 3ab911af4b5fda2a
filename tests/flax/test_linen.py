"""Training and evaluation, and errors of construction and of use."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax

from aqtlite import config
from aqtlite.flax import (
    AqtConvGeneralDilated,
    AqtDotGeneral,
    AqtEinsum,
    QuantMode,
    convert,
)
from tests.common import quick_jit
from tests.flax import models
from tests.flax.support import (
    DG,
    INT8,
    LAST_BY_FIRST,
    NORMAL,
    XX,
    X,
    apply,
    assert_equal,
    check_served,
    init,
)

pytestmark = pytest.mark.code("quick")

STOCHASTIC = config.fully_quantized(bwd_bits=4)


def initialized(build, *args):
    """Variables of the quantized model and of the float one."""
    # In one program, which leaves out all but the initializers.
    return quick_jit(
        lambda: [build(cfg).init(jax.random.key(0), *args) for cfg in (INT8, None)]
    )()


@pytest.mark.parametrize(
    ("build", "args"),
    [
        (models.MlpBlock, (X,)),
        (models.Setup, (X,)),
        (models.Loop, (X,)),
        (models.Tied, (jnp.arange(6),)),
        (models.Trained, (X,)),
        (lambda cfg: models.Attention(cfg, "einsum"), (XX,)),
        (lambda cfg: models.Transformed(cfg, "lora"), (X,)),
        (lambda cfg: models.scanned(nn.remat(models.Layer))(cfg), (X, None)),
    ],
)
def test_init_is_that_of_the_float_model(build, args):
    assert_equal(*initialized(build, *args))


def test_init_does_not_rename_a_users_module():
    class Contraction(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(x)

    class Model(nn.Module):
        cfg: config.DotGeneral | None

        @nn.compact
        def __call__(self, x):
            w = self.param("w", NORMAL, (8, 8))
            x = AqtDotGeneral(self.cfg)(x, w, LAST_BY_FIRST)
            return Contraction()(x)

    assert_equal(*initialized(Model, X))


class Lora(nn.Module):
    base: nn.Module

    def setup(self):
        nn.share_scope(self, self.base)

    @nn.compact
    def __call__(self, x):
        y = self.base(x)
        a = self.param("a", NORMAL, (8, 8))
        return y + self.base.dot_general(x, a, LAST_BY_FIRST)


def test_share_scope():
    model = Lora(nn.Dense(8, dot_general=DG))
    variables = init(model, X)
    serving = convert(model, variables, X)
    assert_equal(apply(model, variables, X), apply(model, serving, X))


def test_none_is_lax_dot_general():
    dense = quick_jit(nn.Dense(24).init)(jax.random.key(0), X)
    plain = jax.make_jaxpr(nn.Dense(24).apply)(dense, X)
    injected = nn.Dense(24, dot_general=AqtDotGeneral(None))
    assert str(jax.make_jaxpr(injected.apply)(dense, X)) == str(plain)
    for precision in (None, "highest"):
        np.testing.assert_array_equal(
            AqtDotGeneral(None)(X, X.T, LAST_BY_FIRST, precision),
            lax.dot_general(X, X.T, LAST_BY_FIRST, precision),
        )
    np.testing.assert_array_equal(
        AqtEinsum(None)("bk,nk->bn", X, X), jnp.einsum("bk,nk->bn", X, X)
    )


def test_trains_with_the_stream_params_alone():
    model = models.Trained(STOCHASTIC)
    variables = init(model, X)
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params, state):
        def loss(params):
            y, _ = model.apply(
                {**variables, "params": params},
                X,
                train=True,
                mutable=["batch_stats"],
                rngs={"dropout": jax.random.key(0)},
            )
            return jnp.mean((y - X) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    params, state = variables["params"], optimizer.init(variables["params"])
    losses = []
    for _ in range(20):
        params, state, value = step(params, state)
        losses.append(float(value))
    assert losses[-1] < 0.7 * losses[0]


@functools.partial(jax.jit, static_argnums=0)
def _gradient(model, variables, rngs):
    def loss(variables):
        return jnp.sum(model.apply(variables, X, rngs=rngs) ** 2)

    return jax.grad(loss)(variables)["params"]


@pytest.mark.parametrize(
    "build",
    [
        models.MlpBlock,
        pytest.param(models.Setup, marks=pytest.mark.slow),
        pytest.param(models.Loop, marks=pytest.mark.slow),
    ],
)
def test_a_stream_aqt_drives_stochastic_rounding(build):
    model = build(STOCHASTIC)
    variables = init(model, X)
    first, again, other = (
        _gradient(model, variables, {"aqt": jax.random.key(i)}) for i in (0, 0, 1)
    )
    assert_equal(first, again)
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True)
    assert any((a != b).any() for a, b in pairs)
    assert_equal(_gradient(model, variables, {}), _gradient(model, variables, {}))


def test_the_stream_does_not_change_the_forward_pass():
    model = models.MlpBlock(STOCHASTIC)
    variables = init(model, X)
    assert_equal(
        apply(model, variables, X),
        apply(model, variables, X, rngs={"aqt": jax.random.key(0)}),
    )


@pytest.mark.parametrize("cls", [AqtDotGeneral, AqtEinsum])
def test_construction_errors(cls):
    with pytest.raises(TypeError, match=r"config\.DotGeneral"):
        cls(8)
    with pytest.raises(ValueError, match="quant_mode"):
        cls(INT8, "serve")
    with pytest.raises(ValueError, match="frozen_operands"):
        cls(INT8, frozen_operands="weights")
    assert cls(INT8) == cls(config.fully_quantized())
    assert len({cls(INT8), cls(INT8), cls(None)}) == 2


def test_a_contraction_that_was_given_something_else():
    with pytest.raises(TypeError, match=r"AqtDotGeneral takes.*AqtEinsum\(cfg\)\(eq"):
        AqtDotGeneral("bk,kn->bn")
    with pytest.raises(TypeError, match=r"got the equation 'bk,kn->bn'; AqtEinsum"):
        DG("bk,kn->bn", X, X.T)


@pytest.mark.parametrize("side", ["lhs", "rhs"])
def test_a_kernel_that_a_restore_lost(side):
    operands = {"lhs": (None, X), "rhs": (X, None)}[side]
    with pytest.raises(TypeError, match=f"the {side} is None: .*without a target"):
        AqtEinsum(INT8)("bk,kn->bn", *operands)


class TwoWeights(nn.Module):
    """In a method that is not compact."""

    functions: tuple

    def setup(self):
        self.first, self.second = self.functions
        self.w1 = self.param("w1", NORMAL, (8, 8))
        self.w2 = self.param("w2", NORMAL, (8, 8))

    def __call__(self, x):
        if isinstance(self.first, AqtEinsum):
            x = self.first("bk,kn->bn", x, self.w1)
            return self.second("bk,kn->bn", x, self.w2)
        x = self.first(x, self.w1, LAST_BY_FIRST)
        return self.second(x, self.w2, LAST_BY_FIRST)


@pytest.mark.parametrize("cls", [AqtDotGeneral, AqtEinsum])
def test_two_attributes_are_two_weights(cls):
    model = TwoWeights((cls(INT8), cls(INT8)))
    variables = init(model, X)
    serving = convert(model, variables, X)
    assert_equal(apply(model, variables, X), apply(model, serving, X))


@pytest.mark.parametrize("cls", [AqtDotGeneral, AqtEinsum])
def test_two_names_are_two_weights(cls):
    model = TwoWeights((cls(INT8, name="a"), cls(INT8, name="b")))
    variables = init(model, X)
    serving = convert(model, variables, X)
    assert set(serving["aqt"]) == {"a", "b"}
    assert_equal(apply(model, variables, X), apply(model, serving, X))


@pytest.mark.parametrize("cls", [AqtDotGeneral, AqtEinsum])
def test_one_instance_for_two_weights(cls):
    one = cls(INT8)
    check_served(TwoWeights((one, one)), X, frozen=2)


def test_a_named_instance_called_twice_in_a_compact_method():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            dot_general = AqtDotGeneral(INT8, name="mix")
            w = self.param("w", NORMAL, (8, 8))
            x = dot_general(x, w, LAST_BY_FIRST)
            return dot_general(x, w, LAST_BY_FIRST)

    assert init(Model(), X)["params"]["w"].shape == (8, 8)


def test_explicit_modes():
    dense = {mode: nn.Dense(24, dot_general=AqtDotGeneral(INT8, mode)) for mode in
             (None, *QuantMode)}  # fmt: skip
    variables = init(dense[None], X)
    expected = apply(dense[None], variables, X)
    assert_equal(expected, apply(dense[QuantMode.TRAIN], variables, X))
    serving = convert(dense[QuantMode.SERVE], variables, X)
    assert_equal(expected, apply(dense[QuantMode.SERVE], serving, X))
    with pytest.raises(ValueError, match="outside"):
        AqtDotGeneral(INT8, QuantMode.SERVE)(X, X.T, LAST_BY_FIRST)
    with pytest.raises(ValueError, match="nothing to freeze"):
        convert(dense[QuantMode.TRAIN], variables, X)
    with pytest.raises(ValueError, match="SERVE") as error:
        dense[QuantMode.SERVE].apply(variables, X)
    assert "the variables hold frozen weights, but nothing" not in str(error.value)


def test_a_cond_trains_and_serves():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = nn.Dense(8, dot_general=DG)
            if self.is_initializing():
                return dense(x)
            return nn.cond(x.sum() > 0, nn.Dense.__call__, nn.Dense.__call__, dense, x)

    model = Model()
    variables = init(model, X)
    serving = convert(model, variables, X)
    assert_equal(apply(model, variables, X), apply(model, serving, X))


# --- One thing for another -----------------------------------------------------------

CLASS = r"the class AqtDotGeneral was called with arrays: a layer takes AqtDotGeneral\("
INSTANCE = "without operands: .*functools.partial.* in a field with _cls at the end"
CONFIG = r"a config.DotGeneral was called as a function: give .*AqtDotGeneral\(cfg\)"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dot_general": AqtDotGeneral}, CLASS),
        ({"dot_general": functools.partial(AqtDotGeneral, INT8)}, CLASS),
        ({"dot_general": INT8}, CONFIG),
        ({"dot_general_cls": DG}, INSTANCE),
        ({"dot_general_cls": INT8}, CONFIG),
        (
            {"dot_general_cls": AqtDotGeneral},
            "AqtDotGeneral was built without a config",
        ),
    ],
)
def test_one_thing_for_another_in_a_layer(fields, words):
    with pytest.raises(TypeError, match=words):
        nn.Dense(8, **fields).init(jax.random.key(0), X)


PLACES = r"dot_general=, and AqtConvGeneralDilated\(cfg\) as conv_general_dilated="


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.Conv(8, (3,), conv_general_dilated=DG), "AqtDotGeneral.*another function"),
        (
            nn.Dense(8, dot_general=AqtConvGeneralDilated(INT8)),
            "AqtConvGeneralDilated.*padding",
        ),
        (nn.Dense(8, dot_general=AqtEinsum(INT8)), "AqtEinsum takes an equation"),
    ],
)
def test_the_function_of_another_operation_in_a_layer(layer, words):
    with pytest.raises(TypeError, match=f"{words}.*{PLACES}"):
        layer.init(jax.random.key(0), X)


def test_the_function_of_another_operation_in_an_einsum():
    conv = AqtConvGeneralDilated(INT8)
    words = "AqtConvGeneralDilated.*dimension numbers of a dot_general"
    with pytest.raises(TypeError, match=f"{words}.*{PLACES}"):
        jnp.einsum("ab,bc->ac", X, X.T, _dot_general=conv)


def test_a_config_that_is_an_attribute_without_an_annotation():
    class Model(nn.Module):
        cfg = INT8

        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, dot_general=AqtDotGeneral(self.cfg))(x)

    assert Model().init(jax.random.key(0), X)["params"]["Dense_0"]
