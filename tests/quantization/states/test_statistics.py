"""Statistics that the caller keeps, without a framework."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import calibration, config, numerics, statistics
from tests.common import MATMUL, normal, tensor
from tests.extensions.running import TENSOR

pytestmark = pytest.mark.code("quick")

X, W = normal((4, 8)), normal((8, 3), 1)
CFG = config.DotGeneral(fwd=config.DotGeneralRaw(lhs=TENSOR, rhs=tensor(8)))
DOT = aqtlite.make_dot_general(CFG)


def states_of(*batches):
    states = statistics.init_states(CFG, X, W, MATMUL)
    for x in batches:
        states = statistics.update_states(CFG, states, x, W, MATMUL)
    return states


def test_the_range_is_that_of_all_batches():
    lhs, *others = states_of(X, 3 * X, X)
    assert not any(others)
    np.testing.assert_array_equal(lhs.state["largest"], [[3 * jnp.abs(X).max()]])
    assert states_of(3 * X, X)[0].state == lhs.state and lhs.batches == 3


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_scale_comes_from_the_state(jit):
    out = jit(lambda x, states: DOT(x, W, MATMUL, states=states))(X, states_of(4 * X))
    step = 4 * jnp.abs(X).max() / 127.5
    assert jnp.abs(out - X @ W).max() < 0.6 * step * jnp.abs(W).sum(0).max()
    fine = jit(lambda x, states: DOT(x, W, MATMUL, states=states))(X, states_of(X))
    assert jnp.abs(fine - X @ W).max() < jnp.abs(out - X @ W).max()


def test_gradients_pass():
    grad = jax.grad(lambda x: DOT(x, W, MATMUL, states=states_of(X)).sum())(X)
    np.testing.assert_allclose(grad, jnp.ones((4, 3)) @ W.T, rtol=0.02, atol=0.02)


OVER_BATCHES = {
    "max": calibration.MaxOverBatches(),
    "max of affine": calibration.MaxOverBatches(of=calibration.MinMax()),
    "mean": calibration.MeanOverBatches(),
    "percentile": calibration.PercentileOverBatches(90),
}


def static(how):
    grid = numerics.IntSymmetric(bits=8)
    if getattr(how, "of", None) == calibration.MinMax():
        grid = numerics.IntAffine(bits=8)
    lhs = config.Tensor(numerics=grid, calibration=how, calib_shared_axes=(0,))
    return config.DotGeneral(fwd=config.DotGeneralRaw(lhs=lhs, rhs=tensor(8)))


@pytest.mark.code("users")
@pytest.mark.parametrize("how", OVER_BATCHES.values(), ids=OVER_BATCHES)
def test_any_split_of_the_batches_merges_to_the_same(how):
    """The order of the sums of a mean is that of the parts: here they are exact."""
    cfg = static(how)
    # Multiples of 1/8.
    batches = jnp.round(8 * normal((5, 4, 8))) / 8
    init = statistics.init_states(cfg, X, W, MATMUL)

    @jax.jit
    def gathered(states, batches):
        def step(states, x):
            return statistics.update_states(cfg, states, x, W, MATMUL), None

        return jax.lax.scan(step, states, batches)[0]

    wanted = gathered(init, batches)
    for parts in ([2, 3], [1, 4], [3, 2], [0, 5], [5, 0]):
        one, other = (
            gathered(init, part) if len(part) else init
            for part in jnp.split(batches, parts[:1])
        )
        merged = statistics.merge_states(cfg, one, other)
        jax.tree.map(np.testing.assert_array_equal, merged, wanted)
    merged = statistics.merge_states(cfg, other, one)
    jax.tree.map(np.testing.assert_array_equal, merged, wanted)


@pytest.mark.parametrize(
    "how",
    [
        calibration.MovingAverage(),
        calibration.DelayedScaling(),
        calibration.WeightedDeviations(max_coeff=1),
        calibration.Periodic(),
        TENSOR.calibration,
    ],
    ids=lambda how: type(how).__name__,
)
def test_statistics_in_the_order_of_batches_do_not_merge(how):
    cfg = static(how)
    states = statistics.init_states(cfg, X, W, MATMUL)
    name = type(how).__name__
    with pytest.raises(ValueError, match=rf"statistics of {name}\(.* cannot be merged"):
        statistics.merge_states(cfg, states, states)
    smoothed = config.smoothquant()
    states = statistics.init_states(smoothed, X, W, MATMUL)
    with pytest.raises(ValueError, match=r"fwd\.smoothing=.*cannot be merged"):
        statistics.merge_states(smoothed, states, states)


def test_without_statistics():
    with pytest.raises(ValueError, match=r"fwd\.lhs\.calibration=.*gathers statistics"):
        DOT(X, W, MATMUL)
    with pytest.raises(ValueError, match="needs statistics of several batches"):
        aqtlite.quantize(X, TENSOR, 1)


def test_before_the_first_batch():
    with pytest.raises(
        ValueError, match=r"fwd\.lhs\.calibration has no statistics yet"
    ):
        DOT(X, W, MATMUL, states=states_of())
    out = jax.jit(lambda states: DOT(X, W, MATMUL, states=states))(states_of())
    assert jnp.isnan(out).all()


OTHER = {
    "history": [calibration.DelayedScaling(length=n) for n in (4, 1)],
    "bins": [calibration.PercentileOverBatches(mantissa_bits=n) for n in (5, 3)],
    "fields": [calibration.MaxOverBatches(), calibration.DelayedScaling()],
}


@pytest.mark.parametrize(
    ("before", "now"),
    [pair for ones in OTHER.values() for pair in (ones, ones[::-1])],
    ids=[f"{name}{way}" for name in OTHER for way in ("", " backwards")],
)
def test_of_another_calibration(before, now):
    """As when a run goes on with another config."""
    first, second = static(before), static(now)
    states = statistics.init_states(first, X, W, MATMUL)
    states = statistics.update_states(first, states, X, W, MATMUL)
    dot = aqtlite.make_dot_general(second)
    for use in (
        lambda: dot(X, W, MATMUL, states=states),
        lambda: statistics.update_states(second, states, X, W, MATMUL),
    ):
        with pytest.raises(ValueError, match=r"fwd\.lhs\..* of another calibration"):
            use()


LEARNED = {
    "LSQ": calibration.LSQ(),
    "PACT": calibration.PACT(),
    "LearnedClipping": calibration.LearnedClipping(),
}
SIZES = {
    "channels": {},
    "tensor": {"calib_shared_axes": "per_tensor"},
    "blocks": {"blocks": config.Blocks(size=4)},
}


@pytest.mark.parametrize("now", SIZES)
@pytest.mark.parametrize("before", SIZES)
@pytest.mark.parametrize("how", LEARNED.values(), ids=LEARNED)
def test_parameters_of_another_granularity(how, before, now):
    """As when a run goes on with another config."""
    first, second = (
        config.update(
            config.weight_only(4),
            {f"fwd.rhs.{field}": value for field, value in fields.items()},
        )
        for fields in (
            {"calibration": how, **SIZES[before]},
            {"calibration": how, **SIZES[now]},
        )
    )
    states = statistics.init_states(first, X, W, MATMUL)
    dot = aqtlite.make_dot_general(second)
    if before == now:
        assert jnp.isfinite(dot(X, W, MATMUL, states=states)).all()
        return
    with pytest.raises(ValueError, match=r"calib_shared_axes.* again"):
        dot(X, W, MATMUL, states=states)


CAST = {
    "max": config.static_int8("max"),
    "mean": static(calibration.MeanOverBatches()),
    "average": static(calibration.MovingAverage()),
    "histogram": config.static_int8("percentile"),
    "affine": config.static_int8("mse", affine=True),
    "affine percentile": config.static_int8("percentile", affine=True),
    "history": config.fp8(delayed=True),
    "smoothing": config.smoothquant(0.5),
    "moment": config.gptq(4, 8),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("cfg", CAST.values(), ids=CAST)
def test_that_were_cast_are_refused(cfg, dtype):
    """A bfloat16 counts to 256: a mean over more batches would grow without bound."""
    states = statistics.init_states(cfg, X, W, MATMUL)
    states = statistics.update_states(cfg, states, X, W, MATMUL)
    gathered = {"lhs", "smoothing", "moment"}
    cast = states._replace(
        **{
            field: jax.tree.map(lambda leaf: leaf.astype(dtype), value)
            for field, value in states._asdict().items()
            if field in gathered
        }
    )
    message = rf"fwd\.\S* was given statistics of {dtype}, which have to be \w+32: cast"
    with pytest.raises(TypeError, match=message):
        statistics.update_states(cfg, cast, X, W, MATMUL)
    if cfg.fwd.rhs.rounding is None:
        with pytest.raises(TypeError, match=message):
            aqtlite.make_dot_general(cfg)(X, W, MATMUL, states=cast)


def test_averaged_counts_are_refused():
    """A float32 counts to 2^24, exactly."""
    cfg = static(calibration.PercentileOverBatches())
    states = statistics.init_states(cfg, X, W, MATMUL)
    one, other = (
        statistics.update_states(cfg, states, x, W, MATMUL) for x in (X, 2 * X)
    )
    mean = jax.tree.map(lambda x, y: (x + y) / 2, one, other)
    with pytest.raises(TypeError, match="of float32, which have to be uint32"):
        aqtlite.make_dot_general(cfg)(X, W, MATMUL, states=mean)


@pytest.mark.parametrize("cfg", CAST.values(), ids=CAST)
def test_initial_states_can_be_donated(cfg):
    states = statistics.init_states(cfg, X, W, MATMUL)
    donating = jax.jit(
        lambda states: statistics.update_states(cfg, states, X, W, MATMUL),
        donate_argnums=0,
    )
    assert jax.tree.structure(donating(states)) == jax.tree.structure(states)


def test_not_of_the_saved_operand():
    with pytest.raises(ValueError, match=r"drhs\.rhs\.calibration=.*only fwd"):
        config.DotGeneral(drhs=config.DotGeneralRaw(rhs=TENSOR))
