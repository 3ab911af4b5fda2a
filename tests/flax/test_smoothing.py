"""Smoothing in Flax: statistics, conversion, and what absorbs it."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite import calibration, config
from aqtlite.flax import AqtDotGeneral, AqtEinsum, absorb_smoothing, calibrate, convert
from aqtlite.testing import assert_served_equals_trained
from tests.common import normal, quick_jit
from tests.flax.support import assert_equal, init

pytestmark = pytest.mark.code("quick")

SMOOTHQUANT = config.smoothquant()
DYNAMIC = config.update(config.fully_quantized(), {"fwd.smoothing": config.Smoothing()})
X = normal((4, 8)).at[:, 2].multiply(50)


class Block(nn.Module):
    cfg: config.DotGeneral

    @nn.compact
    def __call__(self, x):
        dot_general = AqtDotGeneral(self.cfg)
        x = nn.LayerNorm()(x)
        q, k = (nn.Dense(8, name=name, dot_general=dot_general)(x) for name in "qk")
        x = nn.relu(nn.Dense(16, name="up", dot_general=dot_general)(q * k))
        return nn.Dense(4, name="down", dot_general=dot_general)(x)


def gathered(model, x=X):
    variables = init(model, x)
    if "LayerNorm_0" in variables["params"]:
        # A channel that stands out after the norm, too.
        scale = variables["params"]["LayerNorm_0"]["scale"]
        variables["params"]["LayerNorm_0"]["scale"] = scale.at[3].multiply(30)
    return calibrate(model, variables, [x, 2 * x])


@pytest.fixture(scope="module")
def block():
    model = Block(SMOOTHQUANT)
    return model, gathered(model)


@pytest.fixture(scope="module")
def serving(block):
    model, variables = block
    return convert(model, variables, X)


@pytest.fixture(scope="module")
def absorbed(block):
    _, variables = block
    variables = absorb_smoothing(variables, ["q", "k"], into="LayerNorm_0")
    return absorb_smoothing(variables, ["down"], into="up")


def norm_and_dense(cfg):
    return nn.Sequential([nn.RMSNorm(), nn.Dense(4, dot_general=AqtDotGeneral(cfg))])


@pytest.mark.slow
@pytest.mark.code("users")
def test_is_folded_into_frozen_weights(block, serving):
    model, variables = block
    assert_served_equals_trained(model, variables, X, serving=serving)
    factor = serving["aqt_stats"]["q"]["dot_general_ab_bc"]["smoothing"].lhs_factor
    kernel = serving["aqt"]["q"]["kernel"]["rhs"].dequant()
    wanted = variables["params"]["q"]["kernel"] / factor.T
    np.testing.assert_allclose(kernel, wanted, atol=float(jnp.abs(wanted).max()) / 250)
    assert (factor != 1).any()


def test_serving_leaves_the_statistics_as_they_are(block, serving):
    model, variables = block
    run = jax.jit(lambda v: model.apply(v, 9 * X, mutable=["aqt_stats"])[1])
    assert_equal(run(serving)["aqt_stats"], serving["aqt_stats"])
    changed = run(variables)
    assert int(changed["aqt_stats"]["q"]["dot_general_ab_bc"]["smoothing"].batches) == 3


@pytest.mark.code("users")
def test_is_absorbed_by_what_comes_before(block, absorbed):
    """Query and key share scales, so that the norm before them can hold these."""
    model, variables = block
    assert_served_equals_trained(model, absorbed, X)
    only_down = absorb_smoothing(variables, ["down"], into="up")
    run = jax.jit(model.apply)
    np.testing.assert_array_equal(run(only_down, X), run(variables, X))
    scales = [
        variables["aqt_stats"][name]["dot_general_ab_bc"]["smoothing"].lhs_factor
        for name in "qk"
    ]
    shared = absorbed["aqt_stats"]["q"]["dot_general_ab_bc"]["smoothing"].absorbed
    np.testing.assert_array_equal(shared, jnp.maximum(*scales))


@pytest.mark.code("users")
def test_absorbed_it_costs_nothing():
    """Not a product, and the compiled program reads no scale of a smoothing."""
    model, plain = norm_and_dense(SMOOTHQUANT), norm_and_dense(config.fully_quantized())
    variables = gathered(model)
    serving = convert(model, variables, X)
    absorbed = absorb_smoothing(serving, ["layers_1"], into="layers_0")
    float_variables = {"params": variables["params"]}
    lowered = [
        jax.jit(one.apply).lower(of, X)
        for one, of in (
            (plain, convert(plain, float_variables, X)),
            (model, absorbed),
            (model, serving),
        )
    ]
    programs = [one.compile() for one in lowered]
    texts = [one.as_text() for one in programs]
    # Names of functions, which the text has as well, depend on what was traced before.
    assert [
        any("parameter(" in line and "lhs_factor" in line for line in text.splitlines())
        for text in texts
    ] == [False, False, True]
    # As handed to XLA, which repeats products in fusions, as the processor has it.
    counts = [one.as_text().count("stablehlo.multiply") for one in lowered]
    assert counts[0] == counts[1] < counts[2]
    outs = [
        one(of, X) for one, of in zip(programs[1:], (absorbed, serving), strict=True)
    ]
    np.testing.assert_array_equal(*outs)


def test_frozen_weights_keep_their_scales(serving):
    with pytest.raises(ValueError, match="k and q are frozen with different scales"):
        absorb_smoothing(serving, ["q", "k"], into="LayerNorm_0")
    with pytest.raises(ValueError, match="'up' is frozen; absorb the smoothing before"):
        absorb_smoothing(serving, ["down"], into="up")


@pytest.mark.parametrize(
    ("contractions", "into", "match"),
    [
        (["v"], "LayerNorm_0", "'v' has no smoothing with statistics"),
        (["q"], "LayerNorm_1", "is not a module with parameters of its own"),
        (["q"], "up", r"shape \(16,\), whose last axes are not the channels"),
        (["q", "down"], "up", "do not contract one operand"),
        ("q", "LayerNorm_0", "takes a list of paths"),
    ],
)
def test_absorbing_errors(block, contractions, into, match):
    _, variables = block
    with pytest.raises((ValueError, TypeError), match=match):
        absorb_smoothing(variables, contractions, into=into)


def test_absorbing_without_parameters(block):
    variables = {"aqt_stats": block[1]["aqt_stats"]}
    with pytest.raises(
        ValueError, match=r"parameters of its own in variables\['params"
    ):
        absorb_smoothing(variables, ["q"], into="LayerNorm_0")


class OnePlus(nn.Module):
    """A norm that multiplies by one plus its scale, and adds a bias."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.normal(0.3), x.shape[-1:])
        bias = self.param("bias", nn.initializers.normal(), x.shape[-1:])
        return nn.RMSNorm(use_scale=False)(x) * (1 + scale) + bias


def test_a_norm_that_scales_by_one_plus_its_parameter():
    dense = nn.Dense(4, dot_general=AqtDotGeneral(SMOOTHQUANT))
    model = nn.Sequential([OnePlus(), dense])
    variables = gathered(model)
    absorbed = absorb_smoothing(variables, ["layers_1"], into="layers_0", added=1)
    apply, exact = (
        jax.jit(model.apply),
        jax.jit(nn.Sequential([OnePlus(), nn.Dense(4)]).apply),
    )
    np.testing.assert_allclose(apply(absorbed, X), apply(variables, X), atol=1e-4)
    wanted = exact({"params": variables["params"]}, X)
    np.testing.assert_allclose(apply(absorbed, X), wanted, atol=0.1)
    with pytest.raises(TypeError, match="a number as added=, got '1'"):
        absorb_smoothing(variables, ["layers_1"], into="layers_0", added="1")


@pytest.mark.parametrize(
    ("cfg", "norm", "match"),
    [
        (
            config.update(
                config.fully_quantized(),
                {
                    "fwd.rhs.calibration": calibration.MaxOverBatches(),
                    "fwd.rhs.calib_shared_axes": "per_tensor",
                },
            ),
            None,
            "learned or static ranges .* dot_general_ab_bc",
        ),
        (config.lsq(), None, "learned or static ranges"),
        (None, nn.WeightNorm, "'WeightNorm_0' normalizes the kernel of 'up'"),
        (None, nn.SpectralNorm, "'SpectralNorm_0' normalizes the kernel of 'up'"),
    ],
)
def test_what_a_factor_of_the_kernel_would_not_fit(cfg, norm, match):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            up = nn.Dense(8, name="up", dot_general=AqtDotGeneral(cfg))
            if norm is not None:
                more = {"update_stats": False} if norm is nn.SpectralNorm else {}
                up = functools.partial(norm(up), **more)
            dot_general = AqtDotGeneral(config.smoothquant())
            return nn.Dense(4, name="down", dot_general=dot_general)(nn.relu(up(x)))

    variables = calibrate(Net(), init(Net(), X), [X])
    with pytest.raises(ValueError, match=match):
        absorb_smoothing(variables, ["down"], into="up")


def test_absorbing_twice(absorbed):
    with pytest.raises(ValueError, match="smoothing of 'q' is absorbed already"):
        absorb_smoothing(absorbed, ["q"], into="LayerNorm_0")


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = nn.LayerNorm(dtype=x.dtype)(x)
        kernel = self.param("kernel", nn.initializers.normal(0.3), (8, 8), x.dtype)
        return AqtEinsum(SMOOTHQUANT)("btk,kn->btn", x, kernel), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        body = nn.scan(
            nn.remat(Layer),
            variable_axes={"params": 0, "aqt": 0, "aqt_stats": 0},
            split_rngs={"params": True},
            length=3,
        )
        return body(name="layers")(x, None)[0]


@pytest.mark.code("users")
@pytest.mark.parametrize(
    "dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)]
)
def test_under_a_scan_each_layer_has_its_own(dtype):
    x = normal((2, 4, 8), dtype=dtype)
    model = Scanned()
    variables = init(model, x)
    scale = variables["params"]["layers"]["LayerNorm_0"]["scale"]
    spread = 4.0 ** np.arange(24).reshape(3, 8) % 7
    variables["params"]["layers"]["LayerNorm_0"]["scale"] = scale * spread
    variables = calibrate(model, variables, [x])
    assert_served_equals_trained(model, variables, x)
    absorbed = absorb_smoothing(variables, ["layers"], into="layers/LayerNorm_0")
    run = jax.jit(model.apply)
    np.testing.assert_array_equal(run(absorbed, x), run(variables, x))


def test_scales_of_every_call_cannot_be_frozen():
    model = nn.Dense(4, dot_general=AqtDotGeneral(DYNAMIC))
    variables = init(model, X)
    reports = []
    serving = convert(model, variables, X, report=reports.append)
    assert "fwd.smoothing computes its scales from the act" in str(reports[0])
    np.testing.assert_array_equal(model.apply(serving, X), model.apply(variables, X))
    with pytest.raises(ValueError, match=r"kernel: .*fwd\.smoothing"):
        convert(model, variables, X, strict=True)


class Tied(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.normal(0.3), (8, 8))
        first, second = (AqtDotGeneral(SMOOTHQUANT, name=name) for name in "ab")
        dims = (((1,), (0,)), ((), ()))
        return second(first(x, kernel, dims), kernel, dims)


def test_one_weight_with_two_smoothings_stays_in_float():
    model = Tied()
    variables = gathered(model)
    reports = []
    serving = convert(model, variables, X, report=reports.append)
    assert "calibration states of their own" in str(reports[0])
    run = jax.jit(model.apply)
    np.testing.assert_array_equal(run(serving, X), run(variables, X))


def test_a_static_range_after_the_scales():
    """The scales come first; then the ranges are of what they make."""
    changes = {
        "fwd.lhs.calibration": calibration.MaxOverBatches(),
        "fwd.lhs.calib_shared_axes": "per_tensor",
    }
    static = nn.Dense(4, dot_general=AqtDotGeneral(config.update(SMOOTHQUANT, changes)))
    variables = gathered(nn.Dense(4, dot_general=AqtDotGeneral(SMOOTHQUANT)))
    variables = calibrate(static, variables, [X, 2 * X])
    (entry,) = variables["aqt_stats"].values()
    wanted = jnp.abs(2 * X * entry["smoothing"].lhs_factor).max()
    np.testing.assert_array_equal(entry["lhs"].state["ends"]["high"], [[wanted]])
    assert_served_equals_trained(static, variables, X)


def test_without_statistics():
    model = nn.Dense(4, dot_general=AqtDotGeneral(SMOOTHQUANT))
    variables = init(model, X)
    with pytest.raises(ValueError, match=r"statistics .* have seen no batch"):
        convert(model, variables, X)
    with pytest.raises(ValueError, match="has no statistics"):
        convert(model, {"params": variables["params"]}, X)
    with pytest.raises(ValueError, match="are not finite: its statistics have seen no"):
        absorb_smoothing(
            {
                **variables,
                "params": {"a": {"scale": X[0]}},
                "aqt_stats": {"d": variables["aqt_stats"]},
            },
            ["d"],
            into="a",
        )


def test_learned_steps_are_those_of_the_smoothed_operands():
    cfg = config.update(
        config.lsq(8, bwd_bits=None), {"fwd.smoothing": SMOOTHQUANT.fwd.smoothing}
    )
    model = nn.Dense(4, dot_general=AqtDotGeneral(cfg))
    variables = calibrate(model, quick_jit(model.init)(jax.random.key(0), X), [X])
    (entry,) = variables["aqt_stats"].values()
    (steps,) = (v for k, v in variables["params"].items() if k.startswith("aqt_"))
    x = X * entry["smoothing"].lhs_factor
    wanted = calibration.LSQ().init_parameters(x, (0, 1), cfg.fwd.lhs.grid)
    assert_equal(steps["lhs"], wanted)
    assert_served_equals_trained(model, variables, X)
    gradient = jax.grad(lambda v: model.apply({**variables, **v}, X).sum())
    gradients = jax.jit(gradient)({"params": variables["params"]})
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(gradients))
