"""Learned calibrations: their formulas, and their gradients in a contraction."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import calibration, config, numerics, statistics
from tests.common import MATMUL, normal, quick_jit

pytestmark = pytest.mark.code("quick")

INT3 = numerics.IntSymmetric(bits=3, preserve_max_val=True)
UINT3 = numerics.IntAffine(bits=3)
X, W = normal((6, 5)) + 0.3, normal((5, 4), 1)
COTANGENT = normal((6, 4), 2)


def rounded(x):
    """Straight through."""
    return x + jax.lax.stop_gradient(jnp.round(x) - x)


def scaled(x, factor):
    """A number whose gradient has a factor."""
    return factor * x + jax.lax.stop_gradient(x - factor * x)


def fake_lsq(x, parameters, smallest, largest, n):
    step = scaled(parameters["step"], (n * largest) ** -0.5)
    return step * rounded(jnp.clip(x / step, smallest, largest))


def fake_lsq_plus(x, parameters, smallest, largest, n):
    factor = (n * (largest - smallest)) ** -0.5
    step, shift = (scaled(parameters[name], factor) for name in ("step", "shift"))
    whole = jax.lax.stop_gradient(step * jnp.round(shift / step))
    shift = shift + jax.lax.stop_gradient(whole - shift)
    return step * rounded(jnp.clip((x - shift) / step, smallest, largest)) + shift


def fake_pact(x, parameters, smallest, largest, n):
    del n
    bound = parameters["bound"]
    clipped = jnp.clip(x, 0 if smallest == 0 else -bound, bound)
    step = jax.lax.stop_gradient(bound / largest)
    return clipped + jax.lax.stop_gradient(step * jnp.round(clipped / step) - clipped)


def fake_clipping(x, parameters, smallest, largest, n):
    del n
    found = jax.lax.stop_gradient(jnp.max(jnp.abs(x)))
    step = parameters["factor"] * found / largest
    return step * rounded(jnp.clip(x / step, smallest, largest))


CASES = {
    "LSQ": (calibration.LSQ(), INT3, fake_lsq, -3, 3),
    "LSQ, unsigned": (calibration.LSQ(), UINT3, fake_lsq, 0, 7),
    "LSQ+": (calibration.LSQPlus(), UINT3, fake_lsq_plus, 0, 7),
    "PACT": (calibration.PACT(), UINT3, fake_pact, 0, 7),
    "PACT, symmetric": (calibration.PACT(), INT3, fake_pact, -3, 3),
    "clipping": (calibration.LearnedClipping(), INT3, fake_clipping, -3, 3),
}


def config_of(how, grid):
    """Learned activations per tensor, and weights per channel, gradients in float."""
    return config.update(
        config.lsq(3, bwd_bits=None),
        {"fwd.lhs.calibration": how, "fwd.lhs.numerics": grid},
    )


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_formulas(name):
    """A float fake quantization that JAX differentiates is the reference."""
    how, grid, fake, *ends = CASES[name]
    cfg = config_of(how, grid)
    dot = aqtlite.make_dot_general(cfg)
    states = statistics.init_states(cfg, X, W, MATMUL)
    # Some values are clipped, on both sides.
    states = jax.tree.map(lambda parameter: 0.6 * parameter, states)

    @quick_jit
    def both(x, w, states):
        def quantized(x, w, lhs, rhs):
            out = dot(x, w, MATMUL, states=states._replace(lhs=lhs, rhs=rhs))
            return jnp.sum(out * COTANGENT), out

        def reference(x, w, lhs, rhs):
            out = fake(x, lhs, *ends, 30) @ fake_lsq(w, rhs, -3, 3, 5)
            return jnp.sum(out * COTANGENT), out

        args = x, w, states.lhs, states.rhs
        return [jax.grad(f, (0, 1, 2, 3), True)(*args) for f in (quantized, reference)]

    (got, out), (wanted, reference) = both(X, W, states)
    np.testing.assert_allclose(out, reference, rtol=1e-5, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, wanted
    )
    assert all(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(got))
    # As many as are clipped have no gradient.
    assert 0 < np.sum(np.asarray(got[0]) == 0) < X.size


def test_a_step_for_each_block():
    """Blocks are as rows of their own."""
    blocks = {"fwd.rhs.blocks": config.Blocks(size=3), "dlhs.rhs": config.Tensor()}
    cfg = config.update(config.lsq(3, bwd_bits=None), blocks)
    dot, w = aqtlite.make_dot_general(cfg), normal((6, 4))
    x = normal((5, 6), 3)
    states = statistics.init_states(cfg, x, w, MATMUL)
    states = jax.tree.map(lambda parameter: 0.6 * parameter, states)
    steps = states.rhs["step"].reshape(2, 1, 4)

    def loss(w, steps):
        parameters = {"step": steps.reshape(states.rhs["step"].shape)}
        out = dot(x, w, MATMUL, states=states._replace(rhs=parameters))
        return jnp.sum(jnp.sin(out)), out

    def reference(w, steps):
        w = fake_lsq(w.reshape(2, 3, 4), {"step": steps}, -3, 3, 3).reshape(6, 4)
        out = fake_lsq(x, states.lhs, -3, 3, 30) @ w
        return jnp.sum(jnp.sin(out)), out

    got, wanted = (jax.grad(f, (0, 1), True)(w, steps) for f in (loss, reference))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def quantized(x, step, zero_point, smallest, largest):
    stored = np.clip(np.round(x / step) + zero_point, smallest, largest)
    return calibration.Quantized(
        jnp.asarray(x),
        jnp.asarray((stored - zero_point) * step, jnp.float32),
        jnp.full((1,), step, jnp.float32),
        None if smallest < 0 else jnp.full((1,), zero_point, jnp.int32),
    )


def test_gradient_of_each_element():
    """Equation 3 of LSQ, Q_N = Q_P = 3, and those of the others."""
    x = np.array([-9.0, -1.3, 0.2, 0.9, 1.4, 9.0], np.float32)
    one = jnp.ones((1,))

    def each(how, values, grid, parameters):
        found = []
        for i in range(x.size):
            at = values._replace(x=values.x[i : i + 1], rounded=values.rounded[i][None])
            args = parameters, at, one, (0,), grid
            found.append(how.parameters_gradient(*args))
        return {name: np.array([f[name][0] for f in found]) for name in parameters}

    values = quantized(x, 0.5, 0, -3, 3)
    how = calibration.LSQ(gradient_scale=1)
    got = each(how, values, INT3, {"step": one / 2})
    wanted = [-3, -3 + 2.6, 0 - 0.4, 2 - 1.8, 3 - 2.8, 3]
    np.testing.assert_allclose(got["step"], wanted, atol=1e-6)
    mask = how.gradient_mask({"step": one / 2}, values, INT3)
    assert mask.tolist() == [False, True, True, True, True, False]
    scale = each(calibration.LSQ(), values, INT3, {"step": one / 2})["step"] / wanted
    np.testing.assert_allclose(scale, 1 / np.sqrt(3), rtol=1e-5)

    values = quantized(x, 0.5, 3, 0, 7)  # A shift of -1.5.
    parameters = {"step": one / 2, "shift": -1.5 * one}
    how = calibration.LSQPlus(gradient_scale=1)
    got = each(how, values, UINT3, parameters)
    wanted = [0, 0 - 0.4, 3 - 3.4, 5 - 4.8, 6 - 5.8, 7]
    np.testing.assert_allclose(got["step"], wanted, atol=1e-6)
    assert got["shift"].tolist() == [1, 0, 0, 0, 0, 1]

    got = each(calibration.PACT(), values, UINT3, {"bound": one})
    assert got["bound"].tolist() == [0, 0, 0, 0, 1, 1]
    got = each(calibration.PACT(), values, INT3, {"bound": one})
    assert got["bound"].tolist() == [-1, -1, 0, 0, 1, 1]

    values = quantized(x, 0.5, 0, -3, 3)
    how = calibration.LearnedClipping()
    got = each(how, values, INT3, {"factor": one / 6})["factor"]
    np.testing.assert_allclose(got, [-9, -1.2, -1.2, 0.6, 0.6, 9], atol=1e-5)
    mask = how.gradient_mask({"factor": one / 6}, values, INT3)
    assert mask.tolist() == [False, True, True, True, True, False]


def test_start():
    x = jnp.array([[1.0, -3.0, 2.0, -2.0], [0.0, 0.0, 0.0, 0.0]])
    step = calibration.LSQ().init_parameters(x, (1,), INT3)["step"]
    np.testing.assert_allclose(step, [[4 / np.sqrt(3)], [1]], rtol=1e-6)
    step = calibration.LSQ().init_parameters(x, (1,), UINT3)["step"]
    np.testing.assert_allclose(step[0], 4 / np.sqrt(7), rtol=1e-6)
    start = calibration.LSQPlus().init_parameters(x, (1,), UINT3)
    np.testing.assert_allclose(start["step"], [[5 / 7], [1]], rtol=1e-6)
    np.testing.assert_allclose(start["shift"], [[-3], [0]])
    assert calibration.PACT().init_parameters(x, (1,), INT3)["bound"].tolist() == [
        [3.0],
        [1.0],
    ]
    start = calibration.LearnedClipping(initial=0.5).init_parameters(x, (1,), INT3)
    assert start["factor"].tolist() == [[0.5], [0.5]]
    start = calibration.PACT(initial=10).init_parameters(x, (0, 1), INT3)
    assert start["bound"].tolist() == [[10.0]]


@pytest.mark.parametrize(
    ("grid", "levels"),
    [
        (INT3, (-3, 3)),
        (numerics.IntSymmetric(bits=8), (-127, 127)),
        (numerics.IntSymmetric(bits=1), (-0.5, 0.5)),
        (UINT3, (0, 7)),
        (numerics.IntAffine(bits=8, signed=True), (-128, 127)),
        (numerics.IntAffine(bits=8, narrow_range=True), (0, 254)),
        (numerics.Float(exponent_bits=4, mantissa_bits=3), (-448, 448)),
        (numerics.NormalFloat(bits=4), (-1, 1)),
    ],
    ids=str,
)
def test_the_scale_is_the_step(grid, levels):
    how, x = calibration.LSQ(), jnp.zeros((1, 3))
    found = how.range(x, (1,), grid, {"step": jnp.array([[0.3]])})
    scale, zero_point = calibration.scale_and_zero_point(found, grid, po2=False)
    np.testing.assert_allclose(scale / grid.unit, [[0.3]], rtol=1e-6)
    if zero_point is not None:
        smallest, largest = grid.zero_point_range
        assert (smallest - zero_point[0, 0], largest - zero_point[0, 0]) == levels
    # The start of the step shows the largest level.
    start = how.init_parameters(jnp.ones((1, 3)), (1,), grid)["step"]
    np.testing.assert_allclose(start, 2 / np.sqrt(levels[1]), rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_parameters_beyond_zero(name):
    """Negative ones work like their negatives; zero and infinity give no garbage."""
    how, grid, *_ = CASES[name]
    cfg = config_of(how, grid)
    dot = aqtlite.make_dot_general(cfg)
    states = statistics.init_states(cfg, X, W, MATMUL)

    @jax.jit
    def run(lhs, rhs):
        def loss(lhs, rhs):
            given = statistics.States(lhs, rhs)
            out = dot(X, W, MATMUL, states=given)
            return jnp.sum(out * COTANGENT), out

        return jax.grad(loss, (0, 1), has_aux=True)(lhs, rhs)

    def with_sign(parameters, sign):
        return {n: p if n == "shift" else sign * p for n, p in parameters.items()}

    gradients, out = run(states.lhs, states.rhs)
    negative = [with_sign(one, -1) for one in states[:2]]
    others, same = run(*negative)
    np.testing.assert_array_equal(same, out)
    for one, other in zip(gradients, others, strict=True):
        for name_, gradient in with_sign(other, -1).items():
            np.testing.assert_array_equal(gradient, one[name_])
    at_zero, nothing = run(*(with_sign(one, 0) for one in states[:2]))
    assert np.isfinite(nothing).all() and np.abs(nothing).max() < 1e-20
    for leaf in jax.tree.leaves(at_zero):
        assert np.isfinite(leaf).all()
    # Zero is left again.
    assert all(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(at_zero))
    for bad in (jnp.nan, jnp.inf):
        assert np.isnan(run(with_sign(states.lhs, bad), states.rhs)[1]).all()


@pytest.mark.parametrize(
    "how",
    [
        calibration.LSQ(),
        calibration.LSQ(gradient_scale=0.5),
        calibration.LSQPlus(gradient_scale=2),
        calibration.PACT(initial=6),
        calibration.LearnedClipping(of=calibration.RMS(3), initial=0.9),
    ],
    ids=str,
)
def test_json_and_description(how):
    cfg = config_of(how, UINT3)
    assert config.from_json(config.to_json(cfg)) == cfg
    assert type(how).__name__ in config.describe(cfg)


def test_preset():
    cfg = config.lsq(4)
    grid = numerics.IntSymmetric(bits=4, preserve_max_val=True)
    assert cfg.fwd.rhs == config.Tensor(numerics=grid, calibration=calibration.LSQ())
    assert cfg.fwd.lhs == dataclasses.replace(
        cfg.fwd.rhs, calib_shared_axes="per_tensor"
    )
    assert cfg.dlhs == config.fully_quantized().dlhs
    assert config.from_json(config.to_json(cfg)) == cfg
    with pytest.raises(TypeError, match="bits must be an int, got None"):
        config.lsq(None)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: calibration.LSQ(gradient_scale=0), ValueError, "LSQ.gradient_scale"),
        (lambda: calibration.LSQPlus(gradient_scale="1"), TypeError, "LSQPlus.gradien"),
        (lambda: calibration.PACT(initial=-1), ValueError, "PACT.initial must be posi"),
        (
            lambda: calibration.LearnedClipping(of=calibration.LSQ()),
            ValueError,
            r"LearnedClipping.of=LSQ\(.*is learned itself",
        ),
        (
            lambda: calibration.LearnedClipping(of="absmax"),
            TypeError,
            "LearnedClipping.of must be a calibration",
        ),
        (
            lambda: calibration.LearnedClipping(initial=0),
            ValueError,
            "LearnedClipping.initial must be positive",
        ),
        (
            lambda: config.update(
                config.qat(), {"dlhs.lhs.calibration": calibration.LSQ()}
            ),
            ValueError,
            r"dlhs.lhs.calibration=LSQ.* is learned, which only those of fwd.lhs",
        ),
        (
            lambda: aqtlite.quantize(X, config.lsq(4).fwd.rhs, 0),
            ValueError,
            r"calibration=LSQ.* is learned, and its parameters are trained",
        ),
        (
            lambda: aqtlite.make_dot_general(config.lsq(4))(X, W, MATMUL),
            ValueError,
            r"fwd.lhs.calibration=LSQ.* is learned, and was given no state",
        ),
        (
            lambda: statistics.init_states(
                config.update(config.lsq(4), {"fwd.lhs.calib_shared_axes": None}),
                *(X, W, MATMUL),
            ),
            ValueError,
            "fwd.lhs.calib_shared_axes is None: each row of a batch",
        ),
        (
            lambda: statistics.init_states(
                config.lsq(4), jax.ShapeDtypeStruct((6, 5), "float32"), W, MATMUL
            ),
            TypeError,
            "starts at values that it reads off the array, and fwd.lhs is a ShapeDty",
        ),
        (
            lambda: calibration.MovingAverage(of=calibration.LSQ()),
            ValueError,
            r"MovingAverage.of=LSQ\(.*\) is learned itself; give a calibration",
        ),
        (
            lambda: calibration.LSQPlus().init_parameters(X, (0, 1), INT3),
            ValueError,
            "LSQPlus learns a shift, but the grid .* has no zero point",
        ),
    ],
)
def test_refuses(make, error, match):
    with pytest.raises(error, match=match):
        make()


@dataclasses.dataclass(frozen=True)
class Temperature(calibration.Calibration):
    """A learned multiple of the largest magnitude; a user's own."""

    name: str = "factor"
    is_learned = True

    def init_parameters(self, x, axes, grid):
        return {"factor": jnp.ones_like(x.max(axes, keepdims=True))}

    def range(self, x, axes, grid, state):
        return calibration.Range(state["factor"] * jnp.abs(x).max(axes, keepdims=True))

    def parameters_gradient(self, parameters, values, gradient, axes, grid):
        error = (values.rounded - values.x) / parameters["factor"]
        return {self.name: jnp.sum(gradient * error, axes, keepdims=True)}


def test_a_calibration_of_a_users_own():
    def gradient(how):
        cfg = config_of(how, INT3)
        states = statistics.init_states(cfg, X, W, MATMUL)
        dot = aqtlite.make_dot_general(cfg)

        def loss(lhs):
            return dot(X, W, MATMUL, states=states._replace(lhs=lhs)).sum()

        return jax.grad(loss)(states.lhs)

    assert np.abs(gradient(Temperature())["factor"]) > 0
    with pytest.raises(ValueError, match=r"Temperature\.parameters_gradient must retu"):
        gradient(Temperature("other"))


@pytest.mark.parametrize(
    "how", [calibration.LSQ(), calibration.LSQPlus(), calibration.PACT()]
)
def test_refuses_a_grid_on_which_the_step_is_not_the_scale(how):
    """It would be served with another scale than it was trained with."""
    noisy = dataclasses.replace(UINT3, stochastic_rounding=True)
    with pytest.raises(ValueError, match="set stochastic_rounding=False"):
        config.Tensor(numerics=noisy, calibration=how)
    assert config.Tensor(numerics=UINT3, calibration=how).grid == UINT3


def test_smoothed_weights_need_values_of_both_operands():
    """They are divided by scales that the activations give, too."""
    cfg = config.update(
        config.lsq(3),
        {
            "fwd.lhs.calibration": calibration.AbsMax(),
            "fwd.smoothing": config.Smoothing(),
        },
    )
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    match = r"^fwd.rhs.calibration=LSQ\(.* fwd.lhs is a ShapeDtypeStruct"
    with pytest.raises(TypeError, match=match):
        statistics.init_states(cfg, shape, W, MATMUL)
    assert statistics.init_states(cfg, X, W, MATMUL).rhs["step"].shape == (1, 4)
