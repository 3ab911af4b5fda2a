"""Rules of Qwix, read: the integers, scales, outputs and gradients of Qwix itself."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx

from aqtlite import Rule, config, flax, rules
from aqtlite.flax.nnx import convert, plan, quantize_model
from tests.common import normal, relative_error

pytestmark = [pytest.mark.slow, pytest.mark.code("quick")]

TOLERANCE = 2e-6  # Relative error in the Frobenius norm.
OF_TINY_DIFFERENCES = 1e-2  # Where Qwix has an integer more: -128 of int8.


def positive(x, axis):
    """Makes the largest magnitude of eight neighbours positive, and so of all tiles."""
    x = jnp.moveaxis(x, axis, -1)
    tiles = x.reshape(*x.shape[:-1], -1, 8)
    largest = 1.1 * jnp.abs(tiles).max(-1)
    return jnp.moveaxis(tiles.at[..., 0].set(largest).reshape(x.shape), -1, axis)


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(64, 32, rngs=rngs)
        self.down = nnx.Linear(32, 8, rngs=rngs)
        for layer in (self.up, self.down):
            layer.kernel[...] = positive(layer.kernel[...], 0)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


class Attention(nnx.Module):
    """Weights, and activations by activations."""

    def __init__(self, rngs):
        self.query = nnx.Linear(16, 16, rngs=rngs)
        self.out = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        x = self.query(x)
        weights = jnp.einsum("bqd,bkd->bqk", x, x)
        return self.out(jnp.einsum("bqk,bkd->bqd", weights, x))


X = positive(normal((6, 64)), 1)
BOTH = {"weight_qtype": "int8", "act_qtype": "int8"}


def run(model, x):
    return nnx.jit(lambda model, x: model(x))(model, x)


FORWARD = {
    "weights": {"weight_qtype": "int8"},
    "int8": BOTH,
    "a dtype": {"weight_qtype": jnp.int4, "act_qtype": jnp.int8},
    "int3": {"weight_qtype": "int3"},
    "int6": {"weight_qtype": "int6", "act_qtype": "int6"},
    "tiles": {**BOTH, "weight_qtype": "int4", "tile_size": 16},
    "a number of tiles": {"weight_qtype": "int8", "tile_size": 1 / 4},
    "one scale": {**BOTH, "disable_channelwise_axes": True},
    "absmax": {**BOTH, "weight_calibration_method": "absmax,0.95"},
    "rms": {**BOTH, "weight_calibration_method": "rms,3"},
    "fixed": {
        **BOTH,
        "weight_calibration_method": "fixed,-0.5,0.5",
        "act_calibration_method": "fixed,4",
    },
    "minmax": {**BOTH, "act_calibration_method": "minmax"},
    "minmax of weights": {
        "weight_qtype": "int4",
        "weight_calibration_method": "minmax",
    },
    "fp8": {"weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn"},
    "nf4": {"weight_qtype": "nf4", "tile_size": 16},
    "mxfp8": {"weight_qtype": "mxfp8", "act_qtype": "mxfp8", "tile_size": 32},
    "mxfp4": {"weight_qtype": "mxfp4", "tile_size": 32},
    "floats": {"act_qtype": "int8"},
}


def frozen(serving, name):
    """The integers and scales of a layer, in the order of its kernel."""
    weight = serving.aqt.frozen[name]["kernel"].get_value().in_own_order()
    kernel = getattr(Mlp(nnx.Rngs(0)), name).kernel.shape
    values = weight.qvalue.reshape(kernel)
    if weight.numerics is not None and weight.numerics.storage_dtype == jnp.uint4:
        values = jax.lax.bitcast_convert_type(values, jnp.uint4)
    scale = weight.scale.reshape(-1, weight.scale.shape[-1])
    return np.asarray(values, np.float32), np.asarray(scale)


@pytest.mark.code("users")
@pytest.mark.parametrize("fields", FORWARD.values(), ids=FORWARD)
def test_of_one_rule(fields):
    rule = qwix.QtRule(**fields)
    theirs = qwix.quantize_model(Mlp(nnx.Rngs(0)), qwix.QtProvider([rule]), X)
    ours = quantize_model(Mlp(nnx.Rngs(0)), [*rules.from_qwix([rule]), FLOAT])
    assert relative_error(run(ours, X), run(theirs, X)) <= TOLERANCE


FLOAT = Rule(cfg=None, is_required=False)

OF_WEIGHTS = {
    name: fields
    for name, fields in FORWARD.items()
    if fields.get("weight_qtype") and "disable_channelwise_axes" not in fields
}


@pytest.mark.code("users")
@pytest.mark.parametrize("fields", OF_WEIGHTS.values(), ids=OF_WEIGHTS)
def test_integers_and_scales_of_weights(fields):
    rule = qwix.QuantizationRule(**fields)
    theirs = qwix.quantize_model(Mlp(nnx.Rngs(0)), qwix.PtqProvider([rule]), X)
    ours = quantize_model(Mlp(nnx.Rngs(0)), rules.from_qwix([rule]))
    serving = convert(ours, X)
    for name in ("up", "down"):
        values, scale = frozen(serving, name)
        wanted = getattr(theirs, name).kernel.array
        np.testing.assert_array_equal(values, np.asarray(wanted.qvalue, np.float32))
        np.testing.assert_allclose(
            *np.broadcast_arrays(scale, wanted.scale), rtol=TOLERANCE
        )
    assert relative_error(run(serving, X), run(theirs, X)) <= TOLERANCE


def test_smallest_integer_is_not_used():
    """Where the largest magnitude of a channel is negative."""
    rule = {"weight_qtype": "int8"}
    make = functools.partial(nnx.Linear, 64, 32, use_bias=False)
    provider = qwix.PtqProvider([qwix.QuantizationRule(**rule)])
    theirs = qwix.quantize_model(make(rngs=nnx.Rngs(0)), provider, X).kernel.array
    serving = convert(
        quantize_model(make(rngs=nnx.Rngs(0)), rules.from_qwix([rule])), X
    )
    qvalue = np.asarray(theirs.qvalue)
    assert (qvalue == -128).any()
    np.testing.assert_array_equal(
        serving.aqt.frozen[""]["kernel"].qvalue.T, np.maximum(qvalue, -127)
    )


BACKWARD = {
    "floats": (BOTH, TOLERANCE),
    "floats of weights": ({"weight_qtype": "int4"}, TOLERANCE),
    "floats of tiles": ({**BOTH, "tile_size": 16}, TOLERANCE),
    "clipped": (
        {
            "weight_qtype": "float8_e4m3fn",
            "act_qtype": "float8_e4m3fn",
            "weight_calibration_method": "rms,1.5",
            "act_calibration_method": "absmax,0.5",
        },
        TOLERANCE,
    ),
    "int8": ({**BOTH, "bwd_qtype": "int8"}, OF_TINY_DIFFERENCES),
    "tiles": (
        {**BOTH, "tile_size": 16, "bwd_qtype": "int8"},
        OF_TINY_DIFFERENCES,
    ),
    "tiles of gradients": (
        {**BOTH, "bwd_qtype": "int8", "bwd_weight_grad_tile_size": 1 / 2},
        OF_TINY_DIFFERENCES,
    ),
    "weights": (
        {"weight_qtype": "int8", "bwd_qtype": "float8_e5m2"},
        TOLERANCE,
    ),
    "fp8": (
        {
            "weight_qtype": "float8_e4m3fn",
            "act_qtype": "float8_e4m3fn",
            "bwd_qtype": "float8_e5m2",
            "bwd_stochastic_rounding": "uniform",
            "bwd_calibration_method": "absmax",
            "disable_channelwise_axes": True,
        },
        TOLERANCE,
    ),
}


@pytest.mark.parametrize(("fields", "tolerance"), BACKWARD.values(), ids=BACKWARD)
def test_gradients(fields, tolerance):
    """Of one layer, so that both get equal gradients of the output."""

    @nnx.jit
    @functools.partial(nnx.grad, argnums=(0, 1))
    def gradients(model, x):
        return (model(x) * normal((6, 32), seed=3)).sum()

    rule = qwix.QtRule(**fields)
    make = functools.partial(
        nnx.Linear, 64, 32, rngs=nnx.Rngs(0, stochastic_rounding=1)
    )
    models = [make(), make()]
    kernel = positive(models[0].kernel[...], 0)
    for model in models:
        model.kernel[...] = kernel
    if rule.bwd_stochastic_rounding:
        # Floats are rounded to the nearest, and the stream of noise is not read.
        rule = qwix.QtRule(**{**fields, "bwd_stochastic_rounding": None})
    theirs = qwix.quantize_model(models[0], qwix.QtProvider([rule]), X)
    ours = quantize_model(models[1], rules.from_qwix([{**fields}]))
    got, wanted = gradients(ours, X), gradients(theirs, X)
    for one, other in (
        (got[0]["kernel"][...], wanted[0]["kernel"][...]),
        (got[1], wanted[1]),
    ):
        assert relative_error(one, other) <= tolerance


class TestConditions:
    def test_paths(self):
        """The first rule that fits decides, also for floats."""
        given = [
            qwix.QtRule(module_path="down"),
            qwix.QtRule(module_path=".*", **BOTH),
        ]
        theirs = qwix.quantize_model(Mlp(nnx.Rngs(0)), qwix.QtProvider(given), X)
        ours = quantize_model(Mlp(nnx.Rngs(0)), rules.from_qwix(given))
        assert [one.path for one in plan(ours, X).quantized()] == ["up"]
        assert relative_error(run(ours, X), run(theirs, X)) <= TOLERANCE

    @pytest.mark.parametrize("act", [None, "int8"])
    def test_activations(self, act):
        rule = qwix.QtRule(weight_qtype="int8", act_qtype=act)
        x = normal((2, 4, 16))
        theirs = qwix.quantize_model(Attention(nnx.Rngs(0)), qwix.QtProvider([rule]), x)
        ours = quantize_model(Attention(nnx.Rngs(0)), rules.from_qwix([rule]))
        assert len(plan(ours, x).quantized()) == (4 if act else 2)
        assert relative_error(run(ours, x), run(theirs, x)) <= OF_TINY_DIFFERENCES

    @pytest.mark.parametrize(
        ("names", "quantized"),
        [
            (("dot_general",), ["query", "out"]),
            ("einsum", ["bqd,bkd->bqk", "bqk,bkd->bqd"]),
            (("ragged_dot", "einsum"), ["bqd,bkd->bqk", "bqk,bkd->bqd"]),
        ],
    )
    def test_einsums_are_told_apart(self, names, quantized):
        rule = qwix.QtRule(**BOTH, op_names=names)
        x = normal((2, 4, 16))
        theirs = qwix.quantize_model(Attention(nnx.Rngs(0)), qwix.QtProvider([rule]), x)
        ours = quantize_model(Attention(nnx.Rngs(0)), rules.from_qwix([rule]))
        assert [one.path for one in plan(ours, x).quantized()] == quantized
        assert relative_error(run(ours, x), run(theirs, x)) <= OF_TINY_DIFFERENCES

    def test_convolutions(self):

        class Model(nnx.Module):
            def __init__(self, rngs):
                self.conv = nnx.Conv(8, 8, (3,), rngs=rngs)
                self.conv.kernel[...] = positive(self.conv.kernel[...], 1)
                self.dense = nnx.Linear(8, 4, rngs=rngs)

            def __call__(self, x):
                return self.dense(self.conv(x))

        x = positive(normal((2, 16, 8)), 2)
        rule = qwix.QtRule(**BOTH, op_names=("conv_general_dilated",))
        theirs = qwix.quantize_model(Model(nnx.Rngs(0)), qwix.QtProvider([rule]), x)
        ours = quantize_model(Model(nnx.Rngs(0)), rules.from_qwix([rule]))
        assert [one.path for one in plan(ours, x).quantized()] == ["conv"]
        assert relative_error(run(ours, x), run(theirs, x)) <= TOLERANCE

    def test_linen(self):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                x = nn.relu(nn.Dense(16, name="up")(x))
                kernel = self.param("kernel", nn.initializers.normal(), (16, 4))
                return nn.Dense(8, name="uplift")(x) @ kernel[:8]

        given = [{"module_path": "up", "weight_qtype": "int8"}]
        theirs = qwix.quantize_model(
            Model(), qwix.QtProvider([qwix.QtRule(**one) for one in given])
        )
        ours = flax.quantize_model(Model(), rules.from_qwix(given, root="Model"))
        variables = Model().init(jax.random.key(0), X)
        planned = ours.plan(variables, X)
        assert [one.path for one in planned.quantized()] == ["Model/up"]
        out, wanted = ours.apply(variables, X), theirs.apply(variables, X)
        assert relative_error(out, wanted) <= OF_TINY_DIFFERENCES
        top = rules.from_qwix(
            [{"module_path": "", "weight_qtype": "int8"}], root="Model"
        )
        planned = flax.quantize_model(Model(), top).plan(variables, X)
        assert [one.path for one in planned.quantized()] == ["Model"]


REFUSED = {
    "op_names": {"op_names": ("dot_general", "gmm")},
    "weight_qtype": {"weight_qtype": "nvfp4"},
    "weight_qtype='uint8'": {"weight_qtype": "uint8"},
    "act_qtype": {**BOTH, "act_qtype": "bfloat16"},
    "act_static_scale": {**BOTH, "act_static_scale": True},
    "act_static_scale=False": {"weight_qtype": "int8", "act_static_scale": False},
    "weight_calibration_method": {**BOTH, "weight_calibration_method": "minmax,0.9"},
    "act_calibration_method": {**BOTH, "act_calibration_method": "percentile,99"},
    "act_calibration_method=": {**BOTH, "act_calibration_method": "fixed,a"},
    "weight_calibration_method='minmax'": {
        "weight_qtype": "nf4",
        "weight_calibration_method": "minmax",
    },
    "tile_size": {**BOTH, "tile_size": 0.3},
    "weight_qtype='mxfp8'": {"weight_qtype": "mxfp8"},
    "disable_channelwise_axes": {
        **BOTH,
        "tile_size": 16,
        "disable_channelwise_axes": True,
    },
    "bwd_stochastic_rounding": {
        **BOTH,
        "bwd_qtype": "int8",
        "bwd_stochastic_rounding": "low_bit_uniform",
    },
    "additional_qt_config": {**BOTH, "additional_qt_config": {"dlhs_tile_size": 4}},
    "rank": {**BOTH, "rank": 4},
}


@pytest.mark.parametrize(("name", "fields"), REFUSED.items(), ids=REFUSED)
def test_what_has_no_equivalent_is_refused(name, fields):
    with pytest.raises(ValueError, match=f"from_qwix: {name}.* has no equivalent: "):
        rules.from_qwix([fields])


def test_other_fields_and_objects_are_refused():
    lora = qwix.LoraRule(weight_qtype="int8", rank=4, alpha=1.0)
    with pytest.raises(ValueError, match="from_qwix: rank=4 has no equivalent"):
        rules.from_qwix([lora])
    for wrong in ("int8", config.weight_only(), None):
        with pytest.raises(TypeError, match="from_qwix takes rules of Qwix"):
            rules.from_qwix([wrong])
        with pytest.raises(TypeError, match="from_qwix takes rules of Qwix"):
            rules.from_qwix(wrong)


@pytest.mark.parametrize("given", [BOTH, qwix.QuantizationRule(**BOTH)])
def test_one_rule_alone(given):
    assert rules.from_qwix(given) == rules.from_qwix([given])


def test_static_scales_and_noise():
    """They have what Qwix has: a mean over batches per tensor; noise per element."""
    given = qwix.QtRule(
        **BOTH,
        act_static_scale=True,
        disable_channelwise_axes=True,
        bwd_qtype="int8",
        bwd_stochastic_rounding="uniform",
    )
    cfg = rules.from_qwix([given])[0].cfg
    batches = [X, 2 * X]
    ours = quantize_model(Mlp(nnx.Rngs(0)), rules.from_qwix([given]))
    flax.nnx.calibrate(ours, batches)
    assert cfg.dlhs.lhs.numerics.stochastic_rounding
    static = qwix.QtRule(**BOTH, act_static_scale=True, disable_channelwise_axes=True)
    theirs = qwix.quantize_model(Mlp(nnx.Rngs(0)), qwix.QtProvider([static]), X)
    for batch in batches:
        theirs(batch)
    theirs.set_attributes(disable_quant_stats_update=True)
    assert relative_error(run(ours, X), run(theirs, X)) <= OF_TINY_DIFFERENCES
