"""Served outputs equal trained ones, bit for bit, and without float kernels."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from aqtlite import config, numerics
from aqtlite.flax import AqtDotGeneral, AqtEinsum, convert, quantize_model
from tests.common import check_refused, mostly_slow, normal
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
    placeholders,
)

CLS = functools.partial(AqtDotGeneral, INT8)
EINSUM_CLS = functools.partial(AqtEinsum, INT8)


def _tensor(**options):
    return config.Tensor(numerics=numerics.IntSymmetric(bits=8), **options)


def _forward(lhs, rhs):
    return config.DotGeneral(fwd=config.DotGeneralRaw(lhs=lhs, rhs=rhs))


CONFIGS = {
    "int8": INT8,
    "int4": config.fully_quantized(fwd_bits=4),
    "int1": config.fully_quantized(fwd_bits=1),
    "float backward": config.fully_quantized(bwd_bits=None),
    "weight_only": config.weight_only(),
    "weight_only int4": config.weight_only(bits=4),
    "po2": _forward(_tensor(po2_scale=True), _tensor(po2_scale=True)),
    "per_tensor": _forward(
        _tensor(calib_shared_axes="per_tensor"), _tensor(calib_shared_axes="per_tensor")
    ),
    "fake_quant": _forward(_tensor(use_fake_quant=True), _tensor(use_fake_quant=True)),
}


@pytest.mark.parametrize("name", mostly_slow(CONFIGS, "int8", "weight_only", "po2"))
def test_one_instance_in_layers_of_one_shape(name):
    serving = check_served(models.MlpBlock(CONFIGS[name], depth=2), X, frozen=2)
    first, second = (node["kernel"]["rhs"] for node in serving["aqt"].values())
    assert not (first.qvalue == second.qvalue).all()


@pytest.mark.parametrize(
    ("param_dtype", "dtype", "x_dtype"),
    [
        ("float32", "bfloat16", "float32"),
        pytest.param("bfloat16", "bfloat16", "bfloat16", marks=pytest.mark.slow),
        pytest.param("float16", "float16", "float16", marks=pytest.mark.slow),
        pytest.param("bfloat16", None, "float32", marks=pytest.mark.slow),
        pytest.param("float32", None, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_dtypes(param_dtype, dtype, x_dtype):
    dense = functools.partial(
        nn.Dense, dtype=dtype, param_dtype=param_dtype, dot_general=DG
    )
    model = nn.Sequential([dense(24), nn.silu, dense(8)])
    serving = check_served(model, X.astype(x_dtype), frozen=2)
    assert placeholders(serving)[0].dtype == jnp.dtype(param_dtype)


MODELS = {
    "setup": (models.Setup(INT8), X, 4),
    "loop": (models.Loop(INT8), X, 1),
    "weight first": (models.WeightFirst(INT8), X, 1),
    "cls": (nn.Dense(24, dot_general_cls=CLS), X, 1),
    "sequential": (nn.Sequential([nn.Dense(24, dot_general=DG), nn.relu]), X, 1),
    "named": (nn.Dense(24, dot_general=AqtDotGeneral(INT8, name="mix")), X, 1),
    "axes": (nn.DenseGeneral((3, 5), axis=(-2, -1), dot_general=DG), XX, 1),
    "batch axes": (
        nn.DenseGeneral(6, axis=-1, batch_dims=(0,), dot_general=DG),
        XX,
        1,
    ),
    "einsum_dot_general": (models.Attention(INT8, "einsum_dot_general"), XX, 4),
    "einsum": (models.Attention(INT8, "einsum"), XX, 4),
    "attention": (
        nn.MultiHeadDotProductAttention(
            2,
            qkv_dot_general_cls=CLS,
            out_dot_general=DG,
            qk_attn_weights_einsum_cls=EINSUM_CLS,
            attn_weights_value_einsum_cls=EINSUM_CLS,
        ),
        XX,
        4,
    ),
    "tied": (models.Tied(INT8), jnp.arange(6).reshape(2, 3), 1),
    "remat": (nn.remat(models.MlpBlock)(INT8, depth=2), X, 2),
    "nn.jit": (nn.jit(models.MlpBlock)(INT8, depth=2), X, 2),
    "nn.vmap": (
        nn.vmap(
            models.MlpBlock,
            variable_axes={"params": -1, "aqt": -1},
            split_rngs={"params": True},
        )(INT8, depth=2),
        XX,
        2,
    ),
    "nn.vmap over nothing": (
        nn.vmap(
            models.MlpBlock,
            variable_axes={"params": 0, "aqt": 0},
            split_rngs={"params": True},
            in_axes=None,
            axis_size=3,
        )(INT8, use_bias=False, depth=2),
        X,
        2,
    ),
}


@pytest.mark.parametrize(
    "name", mostly_slow(MODELS, "setup", "attention", "tied", "remat", "nn.vmap")
)
def test_models(name):
    model, x, frozen = MODELS[name]
    check_served(model, x, frozen=frozen)


def _mapped(**fields):
    return nn.vmap(
        nn.Dense,
        in_axes=None,
        axis_size=3,
        variable_axes={"params": 0, "aqt": 0},
        split_rngs={"params": True},
    )(8, **fields)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cfg",
    [config.fully_quantized(), *map(config.weight_only, (8, 4)), config.w4a8()],
    ids=["int8", "weight_only", "weight_only int4", "w4a8"],
)
def test_variables_or_inputs_that_a_program_closes_over(cfg):
    """XLA knows constant scales, and still adds no bias before it rounds."""
    model = quantize_model(nn.Sequential([nn.Dense(96), nn.relu, nn.Dense(64)]), cfg)
    x = normal((5, 64))
    zeros = model.init(jax.random.key(0), x)
    variables = jax.tree.map(lambda one: one + normal(one.shape) / 8, zeros)
    serving = convert(model, variables, x)
    wanted = jax.jit(model.apply)(serving, x)
    assert_equal(jax.jit(lambda x: model.apply(serving, x))(x), wanted)
    assert_equal(jax.jit(lambda x: model.apply(variables, x))(x), wanted)
    assert_equal(jax.jit(lambda serving: model.apply(serving, x))(serving), wanted)


def test_a_scale_per_tensor_is_one_for_each_mapped_layer():
    """A rule sees the contraction of all layers, and an injected function that of one:
    what is a tensor differs, and each serves what it trains."""
    cfg = CONFIGS["per_tensor"]
    injected, by_rules = _mapped(dot_general=AqtDotGeneral(cfg)), _mapped()
    variables = init(injected, X)
    serving = check_served(injected, X, frozen=1, variables=variables)
    quantized = quantize_model(by_rules, cfg)
    of_rules = check_served(quantized, X, frozen=1, variables=variables)
    largest = jnp.abs(variables["params"]["kernel"]).max((1, 2))
    scales = serving["aqt"]["kernel"]["rhs"].scale
    assert scales.shape == (3, 1, 1)
    assert_equal(jnp.argsort(scales.ravel()), jnp.argsort(largest))
    (scale,) = of_rules["aqt"]["kernel"]["rhs"].scale.ravel()
    assert scale == scales.max()


@pytest.mark.parametrize("how", ["plain", "transpose", "reshape", "mask"])
def test_transformed_weights(how):
    check_served(models.Transformed(INT8, how), X, frozen=1)


@pytest.mark.parametrize("how", ["standardise", "lora"])
def test_weights_that_nothing_tells_apart_are_quantized_at_every_call(how):
    """Sums and products over placeholders are NaN, whatever they are made of."""
    check_served(models.Transformed(INT8, how), X, frozen=0)


@pytest.mark.parametrize(
    ("axis", "remat"),
    [
        (1, True),
        *(pytest.param(axis, False, marks=pytest.mark.slow) for axis in (0, 1, -1)),
    ],
)
def test_scan_over_layers(axis, remat):
    layer = nn.remat(models.Layer) if remat else models.Layer
    model = models.scanned(layer, axis=axis)(INT8)
    check_served(model, X, None, frozen=2)


def test_nested_scan():
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return models.scanned(nn.remat(models.Layer), length=2)(INT8)(x, None)

    serving = check_served(models.scanned(Outer)(), X, None, frozen=2)
    assert {kernel.shape[:2] for kernel in placeholders(serving)} == {(3, 2)}


def test_the_same_dense_twice():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = nn.Dense(8, dot_general=DG)
            return dense(nn.relu(dense(x)))

    check_served(Twice(), X, frozen=1)


def test_the_same_dense_on_inputs_of_two_ranks():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = nn.Dense(8, dot_general=DG)
            return dense(x) + dense(nn.relu(x)[None])[0]

    check_served(Twice(), X, frozen=1)


def test_serves_another_batch_and_rank():
    model = nn.Dense(24, dot_general=DG)
    variables = init(model, X)
    serving = convert(model, variables, X)
    for x in (X[:1], X[None], X.reshape(2, 2, 1, 8)):
        assert_equal(apply(model, variables, x), apply(model, serving, x))


def test_a_latent_array_serves_another_batch():
    class Latents(nn.Module):
        @nn.compact
        def __call__(self, x):
            latents = self.param("latents", NORMAL, (1, 8))
            query = nn.Dense(8, dot_general=DG)(jnp.broadcast_to(latents, x.shape))
            return query * x

    model = Latents()
    variables = init(model, X)
    serving = convert(model, variables, X)
    assert_equal(apply(model, variables, X[:2]), apply(model, serving, X[:2]))


def test_jax_vmap_of_apply():
    model = models.MlpBlock(INT8, depth=2)
    variables = init(model, X)
    serving = convert(model, variables, X)
    run = jax.jit(jax.vmap(model.apply, in_axes=(None, 0)))
    assert_equal(run(variables, XX), run(serving, XX))


def test_batch_statistics_and_dropout():
    model = models.Trained(INT8)
    variables = init(model, X)
    serving = check_served(model, X, frozen=2, variables=variables, train=False)
    assert_equal(serving["batch_stats"], variables["batch_stats"])
    train = {
        "train": True,
        "mutable": ["batch_stats"],
        "rngs": {"dropout": jax.random.key(3)},
    }
    check_served(model, X, frozen=2, variables=variables, **train)


def test_cache():
    model = nn.MultiHeadDotProductAttention(
        2, decode=True, qkv_dot_general_cls=CLS, out_dot_general_cls=CLS
    )
    trained = init(model, XX)
    serving = convert(model, trained, XX[:, :1], mutable=["cache"])
    assert len(placeholders(serving)) == 4
    for t in range(3):
        token = XX[:, t : t + 1]
        wanted, cache = apply(model, trained, token, mutable=["cache"])
        served, served_cache = apply(model, serving, token, mutable=["cache"])
        assert_equal((wanted, cache), (served, served_cache))
        trained, serving = {**trained, **cache}, {**serving, **served_cache}


def test_a_raw_jit_in_setup_style():
    class Raw(nn.Module):
        def setup(self):
            self.dot_general = AqtDotGeneral(INT8)
            self.dense = nn.Dense(8, dot_general=self.dot_general)
            self.w = self.param("w", NORMAL, (8, 24))

        def __call__(self, x):
            inner = jax.jit(lambda x, w: self.dot_general(x, w, LAST_BY_FIRST))
            return inner(self.dense(x), self.w)

    check_served(Raw(), X)


def test_weight_norm():
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.WeightNorm(nn.Dense(24, dot_general=DG))(x)

    model = Normed()
    check_served(model, X, frozen=0)
    with pytest.raises(ValueError, match=r"Dense_0/kernel.*nn\.WeightNorm"):
        convert(model, init(model, X), X, strict=True)


class ReadsAnotherKernel(nn.Module):
    """A layer, and a contraction of its kernel that reads it from the variables."""

    def setup(self):
        self.layer = nn.Dense(X.shape[-1], use_bias=False, dot_general=DG)
        self.other = AqtDotGeneral(INT8)

    def __call__(self, x):
        return self.layer(x)

    def decode(self, y):
        kernel = self.layer.variables["params"]["kernel"]
        return self.other(y, kernel, LAST_BY_FIRST)


def test_a_kernel_of_another_layer_says_that_it_is_frozen():
    model = ReadsAnotherKernel()
    serving = convert(model, init(model, X), X)
    with pytest.raises(TypeError, match="'layer/kernel' is frozen .* its own layer"):
        model.apply(serving, X, method="decode")
    check_refused(serving["params"]["layer"]["kernel"])
