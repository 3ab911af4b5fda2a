"""Rules of Qwix, read: the integers, scales, outputs and gradients of Qwix itself."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx
from qwix._src.core import qarray, sparsity
from qwix.contrib import awq, gptq, qep, smooth_quant

import aqtlite
from aqtlite import Rule, config, flax, numerics, rules
from aqtlite.errors import RulesError
from aqtlite.flax.nnx import convert, plan, quantize_model
from aqtlite.qtensor import stored_values
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
    "clipped minmax": {**BOTH, "act_calibration_method": "minmax,0.9"},
    "clipped minmax of weights": {
        "weight_qtype": "int4",
        "weight_calibration_method": "minmax,0.8",
    },
    "fp8": {"weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn"},
    "nf4": {"weight_qtype": "nf4", "tile_size": 16},
    "mxfp8": {"weight_qtype": "mxfp8", "act_qtype": "mxfp8", "tile_size": 32},
    "mxfp4": {"weight_qtype": "mxfp4", "tile_size": 32},
    "nvfp4": {"weight_qtype": "nvfp4", "act_qtype": "nvfp4", "tile_size": 16},
    "nvfp4 of weights": {"weight_qtype": "nvfp4", "tile_size": 16},
    "fields of contractions": {
        **BOTH,
        "additional_qt_config": {
            "rhs_qtype": "int4",
            "lhs_disable_channelwise_axes": True,
        },
    },
    "floats": {"act_qtype": "int8"},
}


def installed_scales():
    """What the installed Qwix does with 6.5, in blocks of a grid up to 6."""
    found = qarray.compute_scale_zero_point({"absmax": jnp.array([6.5])}, "mxfp4")
    return {2.0: "ceil", 1.0: "overflow_aware"}[float(found[0][0])]


read = functools.partial(rules.from_qwix, mx_scales=installed_scales())


def frozen(serving, name):
    """The stored values and scales of a layer, in the order of its kernel."""
    weight = serving.aqt.frozen[name]["kernel"].get_value().in_own_order()
    kernel = getattr(Mlp(nnx.Rngs(0)), name).kernel.shape
    values = stored_values.on_grid(weight.qvalue, weight.numerics).reshape(kernel)
    scale = weight.scale.reshape(-1, weight.scale.shape[-1])
    return np.asarray(values, np.float32), np.asarray(scale)


def compiled_as_needed(cases):
    """Parameters of tests: values between two of a grid of 4 bits need users' code."""
    as_users = pytest.mark.code("users")
    return [
        pytest.param(
            fields,
            id=name,
            marks=[as_users] if "mxfp4" in name or "nvfp4" in name else [],
        )
        for name, fields in cases.items()
    ]


@pytest.mark.parametrize("fields", compiled_as_needed(FORWARD))
def test_of_one_rule(fields):
    rule = qwix.QtRule(**fields)
    theirs = qwix.quantize_model(Mlp(nnx.Rngs(0)), qwix.QtProvider([rule]), X)
    ours = quantize_model(Mlp(nnx.Rngs(0)), [*read([rule]), FLOAT])
    assert relative_error(run(ours, X), run(theirs, X)) <= TOLERANCE


FLOAT = Rule(cfg=None, is_required=False)

OF_WEIGHTS = {
    name: fields
    for name, fields in FORWARD.items()
    if fields.get("weight_qtype")
    and not {"disable_channelwise_axes", "additional_qt_config"} & {*fields}
}


@pytest.mark.parametrize("fields", compiled_as_needed(OF_WEIGHTS))
def test_integers_and_scales_of_weights(fields):
    rule = qwix.QuantizationRule(**fields)
    theirs = qwix.quantize_model(Mlp(nnx.Rngs(0)), qwix.PtqProvider([rule]), X)
    ours = quantize_model(Mlp(nnx.Rngs(0)), read([rule]))
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
    "floats of clipped minmax": (
        {**BOTH, "act_calibration_method": "minmax,0.9"},
        OF_TINY_DIFFERENCES,
    ),
    "not clipped": (
        {
            **BOTH,
            "weight_calibration_method": "absmax,0.5",
            "additional_qt_config": {"disable_gradient_clipping": True},
        },
        TOLERANCE,
    ),
    "integers": (
        {**BOTH, "additional_qt_config": {"use_original_residuals": False}},
        OF_TINY_DIFFERENCES,
    ),
    "residuals": (
        {
            **BOTH,
            "bwd_qtype": "int8",
            "additional_qt_config": {
                "use_original_residuals": True,
                "dlhs_residual_qtype": "int8",
                "drhs_residual_qtype": "float8_e4m3fn",
                "drhs_residual_disable_channelwise_axes": True,
                "dlhs_tile_size": 16,
                "drhs_grad_qtype": "float8_e5m2",
            },
        },
        OF_TINY_DIFFERENCES,
    ),
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


FP8 = {"weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn"}
OF_SEVERAL_AXES = {
    "weights": {"weight_qtype": "float8_e4m3fn", "tile_size": 8},
    "fp8": {**FP8, "tile_size": 1 / 2},
    "gradients": {**FP8, "bwd_qtype": "float8_e5m2", "tile_size": 8},
    "tiles of gradients": {
        **FP8,
        "bwd_qtype": "float8_e5m2",
        "bwd_weight_grad_tile_size": 1 / 2,
    },
}


@pytest.mark.parametrize("fields", OF_SEVERAL_AXES.values(), ids=OF_SEVERAL_AXES)
def test_tiles_of_several_contracting_axes(fields):
    """As of the projection behind attention, and of gradients of its weights."""

    @nnx.jit
    @functools.partial(nnx.value_and_grad, argnums=(0, 1))
    def results(model, x):
        return (model(x) * normal((2, 6, 24), seed=3)).sum()

    make = functools.partial(
        nnx.LinearGeneral, (4, 16), 24, axis=(-2, -1), use_bias=False
    )
    x = normal((2, 6, 4, 16))
    rule = qwix.QtRule(**fields)
    provider = qwix.QtProvider([rule])
    theirs = qwix.quantize_model(make(rngs=nnx.Rngs(0)), provider, x)
    ours = quantize_model(make(rngs=nnx.Rngs(0)), rules.from_qwix([rule]))
    jax.tree.map(
        lambda one, other: np.testing.assert_array_less(
            relative_error(one, other), TOLERANCE
        ),
        results(ours, x),
        results(theirs, x),
    )
    if "bwd_qtype" in fields:
        return
    values, scale = (
        getattr(convert(ours, x).aqt.frozen[""]["kernel"].in_own_order(), name)
        for name in ("qvalue", "scale")
    )
    provider = qwix.PtqProvider([qwix.QuantizationRule(**fields)])
    wanted = qwix.quantize_model(make(rngs=nnx.Rngs(0)), provider, x).kernel.array
    np.testing.assert_array_equal(
        np.float32(values), np.float32(wanted.qvalue).reshape(values.shape)
    )
    assert scale.shape == (1, 2, 24)
    np.testing.assert_array_equal(scale, wanted.scale.reshape(scale.shape))


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

    def test_kernels(self):
        """By the names under which they are registered."""

        @jax.jit
        def batched(x, w):
            return x @ w

        aqtlite.register_operation("batched", jnp.matmul)
        given = rules.from_qwix({**BOTH, "op_names": ("batched", "ragged_dot")})
        planned = aqtlite.plan(
            lambda w, x: batched(x, w) @ w,
            jnp.ones((8, 8)),
            X[:, :8],
            rules=given,
            params=0,
        )
        assert [one.is_quantized for one in planned.contractions] == [True, False]

    def test_methods_of_linen(self):
        """The path of a module does not name the methods by which it is called."""

        class Decoder(nn.Module):
            def setup(self):
                self.up = nn.Dense(16)
                self.head = nn.Dense(8)

            def apply_output_head(self, x):
                with jax.named_scope("output"):
                    return self.head(x)

            def __call__(self, x):
                x = self.up(x)
                x = x + jnp.einsum("bd,dk->bk", x, jnp.eye(16))
                return self.apply_output_head(nn.relu(x))

        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                return Decoder(name="decoder")(x)

        given = [
            qwix.QtRule(module_path="decoder", weight_qtype=None),
            qwix.QtRule(module_path="decoder/(up|head)", **BOTH),
        ]
        theirs = qwix.quantize_model(Model(), qwix.QtProvider(given))
        ours = flax.quantize_model(Model(), rules.from_qwix(given, root="Model"))
        variables = Model().init(jax.random.key(0), X)
        planned = ours.plan(variables, X)
        assert [one.path for one in planned.quantized()] == [
            "Model/decoder/up",
            "Model/decoder/head",
        ]
        out, wanted = ours.apply(variables, X), theirs.apply(variables, X)
        assert relative_error(out, wanted) <= OF_TINY_DIFFERENCES

    @pytest.mark.parametrize("root", ["", "Model", "Other"])
    @pytest.mark.parametrize("path", ["up", "down", "layers/.*"])
    def test_rules_of_no_use(self, root, path):
        """A wrong root, or a path of no module."""

        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(4, name="down")(nn.Dense(8, name="up")(x))

        given = [qwix.QtRule(module_path=path), qwix.QtRule(**BOTH)]
        ours = flax.quantize_model(Model(), rules.from_qwix(given, root=root))
        variables = jax.eval_shape(Model().init, jax.random.key(0), X)
        if root != "Other" and path != "layers/.*":
            (left,) = ours.plan(variables, X).left_float()
            assert left.module == path
            return
        with pytest.raises(RulesError, match="rule 0 .* matches nothing"):
            ours.plan(variables, X)

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
    "op_names": {"op_names": ("dot_general", "unheard_of")},
    "weight_qtype": {"weight_qtype": "nvfp4"},
    "weight_qtype='mxfp8_16'": {"weight_qtype": "mxfp8_16", "tile_size": 32},
    "weight_qtype='uint8'": {"weight_qtype": "uint8"},
    "weight_qtype=8": {"weight_qtype": 8},
    "additional_qt_config=3": {"weight_qtype": "int8", "additional_qt_config": 3},
    "act_qtype": {**BOTH, "act_qtype": "bfloat16"},
    "act_static_scale": {**BOTH, "act_static_scale": True},
    "act_static_scale=False": {"weight_qtype": "int8", "act_static_scale": False},
    "weight_calibration_method": {**BOTH, "weight_calibration_method": "rms"},
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
        "bwd_stochastic_rounding": "normal",
    },
    r"additional_qt_config\['dlhs_tiles'\]": {
        **BOTH,
        "additional_qt_config": {"dlhs_tiles": 4},
    },
    r"additional_qt_config\['lhs_collect_quant_stat'\]": {
        **BOTH,
        "additional_qt_config": {"lhs_collect_quant_stat": min},
    },
    r"additional_qt_config\['sparsity_rule'\]": {
        **BOTH,
        "additional_qt_config": {
            "sparsity_rule": sparsity.SparsityRule(
                weight_sparsity_n=2, weight_sparsity_m=4
            )
        },
    },
}


@pytest.mark.parametrize(("name", "fields"), REFUSED.items(), ids=REFUSED)
def test_what_has_no_equivalent_is_refused(name, fields):
    with pytest.raises(ValueError, match=f"from_qwix: {name}.* has no equivalent: "):
        rules.from_qwix([fields])


def test_the_refusal_of_a_mask_of_weights_names_ours():
    how = sparsity.SparsityRule(weight_sparsity_n=2, weight_sparsity_m=4)
    for given in (
        {"sparsity_rule": how},
        REFUSED[r"additional_qt_config\['sparsity_rule'\]"],
    ):
        with pytest.raises(ValueError, match="set fwd.rhs.sparsity to config.NofM"):
            rules.from_qwix([{**BOTH, **given}])


@pytest.mark.parametrize(
    ("rule", "remedy"),
    [
        (awq.AwqRule, "AwqRule of qwix.contrib .*config.Smoothing"),
        (gptq.GptqRule, "GptqRule of qwix.contrib .*config.gptq"),
        (qep.QepRule, "QepRule of qwix.contrib .*config.gptq"),
        (smooth_quant.SqRule, "SqRule of qwix.contrib .*config.smoothquant"),
    ],
)
def test_rules_of_methods_are_refused(rule, remedy):
    with pytest.raises(ValueError, match=remedy):
        rules.from_qwix(rule(**BOTH))


def test_the_strength_of_smoothing_is_refused():
    with pytest.raises(ValueError, match=r"alpha=0.5.*config.smoothquant"):
        rules.from_qwix({**BOTH, "alpha": 0.5})


def test_other_objects_are_refused():
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


def test_scales_that_clip_less_than_half_a_step():
    """Those of Qwix since August 2026, which no release has yet."""
    mxfp4, mxfp8 = (
        rules.from_qwix({"weight_qtype": name, "tile_size": size})[0].cfg.fwd.rhs
        for name, size in (("mxfp4", 32), ("mxfp8_16", 16))
    )
    x = jnp.exp(3 * normal((32, 512)))
    for tensor, size, largest, factor in (
        (mxfp4, 32, 6, 12 / 7),
        (mxfp8, 16, 448, 60 / 31),
    ):
        found = aqtlite.quantize(x, tensor, 0).scale.reshape(32 // size, 512)
        bound = jnp.abs(x.reshape(-1, size, 512)).max(1)
        power = (bound / largest * factor).astype(jnp.bfloat16).astype(jnp.float32)
        np.testing.assert_array_equal(found, 2.0 ** np.floor(np.log2(power)))
    with pytest.raises(ValueError, match="mx_scales must be one of"):
        rules.from_qwix(BOTH, mx_scales="floor")


def test_int16():
    """Of the newest Qwix: the largest magnitude is mapped to 32768."""
    (weight, _) = rules.from_qwix({"weight_qtype": "int16"})
    x = normal((32, 16))
    found = aqtlite.quantize(x, weight.cfg.fwd.rhs, 0)
    scale = np.abs(np.asarray(x, np.float64)).max(0, keepdims=True) / 32768
    np.testing.assert_allclose(found.scale, scale, rtol=3e-7)
    wanted = np.clip(np.round(np.asarray(x) / scale), -32767, 32767)
    assert np.abs(np.asarray(found.qvalue, np.int32) - wanted).max() <= 1
    assert weight.cfg.fwd.rhs.numerics == numerics.IntSymmetric(bits=16)


@pytest.mark.parametrize("noise", ["uniform", "low_bit_uniform"])
def test_noise(noise):
    rule = qwix.QtRule(**BOTH, bwd_qtype="int8", bwd_stochastic_rounding=noise)
    cfg = rules.from_qwix([rule])[0].cfg
    assert cfg.dlhs.lhs.needs_noise
    assert cfg.drhs.lhs.needs_noise


def test_sparsity():
    how = sparsity.SparsityRule(
        weight_sparsity_n=2, weight_sparsity_m=4, weight_sparsity_order="C"
    )
    given = {"weight_qtype": "int8", "additional_qt_config": {"sparsity_rule": how}}
    weight, activations, *others = rules.from_qwix(given)
    assert weight.cfg.fwd.rhs.sparsity == config.NofM(2, 4, decay=0.0)
    assert activations.cfg is None
    # Qwix gives such fields to convolutions as little as to ragged_dot.
    assert all(one.cfg is None or not one.cfg.fwd.rhs.sparsity for one in others)
    assert {one.group for one in (weight, *others)} == {"rule 0 of Qwix"}


def test_rules_of_lora_give_the_results_of_qwix():
    """Of one base and the same adapters."""
    rule = qwix.LoraRule(module_path=".*", weight_qtype="int8", rank=4, alpha=6.0)
    theirs = qwix.apply_lora_to_model(
        Mlp(nnx.Rngs(0)), qwix.LoraProvider([rule]), X, rngs=nnx.Rngs(1)
    )
    ours = quantize_model(Mlp(nnx.Rngs(0)), rules.from_qwix([rule]))
    ours = convert(ours, X)
    flax.nnx.init_state(ours, X)
    for name, layer in (("up", theirs.up), ("down", theirs.down)):
        own = ours.aqt.learned[name]["adapter"]
        layer.kernel_lora_b[...] = normal(layer.kernel_lora_b.shape, 7)
        for letter in "ab":
            own[f"lora_{letter}"][...] = getattr(layer, f"kernel_lora_{letter}")[...]
    assert relative_error(ours(X), theirs(X)) < OF_TINY_DIFFERENCES


def test_fields_of_lora_without_an_equivalent():
    (weight, activations) = rules.from_qwix({"rank": 2, "alpha": 4, "dropout": 0.1})
    assert weight.adapter == config.Lora(2, 4, 0.1)
    assert (weight.cfg, activations.cfg) == (None, None)
    with pytest.raises(ValueError, match="needs an alpha"):
        rules.from_qwix({"rank": 2})
    ones = jax.nn.initializers.ones
    for field in ("lora_a_initializer", "lora_b_initializer"):
        rule = qwix.LoraRule(rank=2, alpha=4.0, **{field: ones})
        with pytest.raises(ValueError, match=field):
            rules.from_qwix(rule)
    with pytest.raises(ValueError, match="lora_b_initializer"):
        rules.from_qwix({"rank": 2, "alpha": 4, "lora_b_initializer": ones})


def test_fields_that_later_versions_add_are_none():
    rule = {"module_path": ".*", "weight_qtype": "int8"}
    assert rules.from_qwix([{**rule, "later": None}]) == rules.from_qwix([rule])
    with pytest.raises(ValueError, match="from_qwix: later=1 has no equivalent"):
        rules.from_qwix([{**rule, "later": 1}])
