"""Weights rounded by GPTQ, against NumPy programs written from arXiv:2210.17323."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import aqtlite
from aqtlite import calibration, config, numerics
from aqtlite.program.serving import statistics_uses
from aqtlite.quantization.states.second_moment import SecondMoment
from tests.common import mostly_slow, normal

pytestmark = pytest.mark.code("quick")

HOW = config.Gptq()
MIN_MAX = {"fwd.rhs.calibration": calibration.MinMax()}


def config_of(grid, how=HOW, **fields):
    changes = {"fwd.rhs.numerics": grid, "fwd.rhs.rounding": how}
    if grid.zero_point_range is not None:
        changes |= MIN_MAX
    changes |= {f"fwd.rhs.{name}": value for name, value in fields.items()}
    return config.update(config.weight_only(), changes)


def correlated(*shape, seed=0, rank=None):
    """Inputs of which each is a mixture of fewer numbers than there are inputs."""
    rng, size = np.random.default_rng(seed), shape[-1]
    rank = rank or size
    mixed = rng.normal(size=(*shape[:-1], rank)) @ rng.normal(size=(rank, size))
    return jnp.asarray(mixed, jnp.float32)


def weights(*shape, seed=1):
    return normal(shape, seed)


def converted(fn, cfg, w, *batches, report=None):
    """The served function and its parameters, after a call with each batch."""
    fn_q = aqtlite.quantize_function(fn, cfg, params=0)
    state = fn_q.init_state(w, *batches[0])
    call = jax.jit(fn_q)
    for batch in batches:
        _, state = call(state, w, *batch)
    sample = batches[0]
    return aqtlite.convert_function(fn_q, w, *sample, state=state, report=report)


def frozen(serving):
    leaves = jax.tree.leaves(serving["aqt"], is_leaf=is_qtensor)
    (q,) = filter(is_qtensor, leaves)
    return q.in_own_order()


def is_qtensor(x):
    return isinstance(x, aqtlite.QTensor)


def rounded_by(fn, cfg, w, *batches):
    return frozen(converted(fn, cfg, w, *batches)[1])


def nearest_by(fn, cfg, w, *sample):
    cfg = config.update(cfg, {"fwd.rhs.rounding": None})
    fn_q = aqtlite.quantize_function(fn, cfg, params=0)
    return frozen(aqtlite.convert_function(fn_q, w, *sample)[1])


def steps_of(q):
    """The values that each weight can take, float64: a new last axis."""
    grid, scale = q.numerics, np.asarray(q.scale, np.float64)
    if q.zero_point is None:
        some = 2.0 ** jnp.linspace(-12, 10, 2000)
        stored = grid.round(jnp.concatenate([-some, jnp.zeros(1), some]), None)
        values = np.unique(np.asarray(grid.decode(stored), np.float64))
        values = scale[..., None] * values
    else:
        codes = np.arange(grid.zero_point_range[0], grid.zero_point_range[1] + 1)
        values = scale[..., None] * (codes - np.asarray(q.zero_point)[..., None])
    for axis, size in enumerate(q.shape):
        values = values.repeat(size // values.shape[axis], axis)
    return values


def gptq(w, values, h, damping=0.01, act_order=True):
    """The paper's algorithm: the rounded rows of w, for inputs of second moment h."""
    w, h, mean = np.array(w, np.float64), np.array(h, np.float64), np.mean(np.diag(h))
    is_dead, order = np.diag(h) == 0, np.arange(len(h))
    if act_order:
        order = np.argsort(-np.diag(h), kind="stable")
    h = h + np.diag(is_dead * mean) + damping * mean * np.eye(len(h))
    u = np.linalg.cholesky(np.linalg.inv(h[order][:, order])).T
    w, values, result = w[order], values[order], np.empty_like(w)
    for i, row in enumerate(w):
        nearest = np.abs(values[i] - row[:, None]).argmin(-1)
        rounded = np.take_along_axis(values[i], nearest[:, None], -1)[:, 0]
        result[order[i]] = rounded
        w[i + 1 :] -= np.outer(u[i, i + 1 :], (row - rounded) / u[i, i])
    return result


def moment(x):
    return np.asarray(x, np.float64).T @ np.asarray(x, np.float64)


def matmul(w, x):
    return x @ w


GRIDS = {
    "int4": numerics.IntSymmetric(bits=4),
    "int3": numerics.IntSymmetric(bits=3),
    "uint4": numerics.IntAffine(bits=4),
    "nf4": numerics.NormalFloat(bits=4),
    "fp4": numerics.Float.from_dtype("float4_e2m1fn"),
    "fp8": numerics.Float.from_dtype("float8_e4m3fn"),
}


@pytest.mark.parametrize("grid", mostly_slow(GRIDS, "uint4", "nf4"))
def test_rounds_as_the_paper_does(grid):
    x, w = correlated(300, 40), weights(40, 12)
    cfg = config_of(GRIDS[grid], blocks=config.Blocks(size=8))
    q = rounded_by(matmul, cfg, w, (x[:100],), (x[100:],))
    wanted = gptq(w, steps_of(q), moment(x))
    np.testing.assert_allclose(q.dequant(), wanted, rtol=1e-5, atol=1e-7)
    # The scales are those of the weights themselves.
    nearest = nearest_by(matmul, cfg, w, x)
    assert (nearest.scale == q.scale).all()
    assert (nearest.qvalue != q.qvalue).any()


@pytest.mark.parametrize("act_order", [False, True])
def test_more_inputs_than_a_block(act_order):
    x, w = correlated(500, 200), weights(200, 6)
    how = config.Gptq(damping=0.05, act_order=act_order)
    q = rounded_by(matmul, config_of(GRIDS["int4"], how), w, (x,))
    wanted = gptq(w, steps_of(q), moment(x), 0.05, act_order)
    np.testing.assert_allclose(q.dequant(), wanted, rtol=1e-5, atol=1e-7)


def error(x, w, q):
    return float(jnp.sum((x @ (q.dequant() - w)) ** 2))


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("size", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_outputs_are_nearer_than_those_of_nearest_weights(bits, size):
    x, w = correlated(512, 64), weights(64, 32)
    cfg = config_of(numerics.IntAffine(bits=bits), blocks=config.Blocks(size=size))
    q = rounded_by(matmul, cfg, w, (x[:384],))
    nearest = nearest_by(matmul, cfg, w, x)
    assert error(x[384:], w, q) < 0.6 * error(x[384:], w, nearest)


def test_uncorrelated_inputs_leave_nearest_weights():
    x, w = jnp.eye(24) * jnp.arange(1.0, 25), weights(24, 8)
    cfg = config_of(GRIDS["int4"])
    q = rounded_by(matmul, cfg, w, (x,))
    assert (q.qvalue == nearest_by(matmul, cfg, w, x).qvalue).all()


def test_large_damping_leaves_nearest_weights():
    x, w = correlated(100, 24), weights(24, 8)
    cfg = config_of(GRIDS["int4"], config.Gptq(damping=1e9))
    q = rounded_by(matmul, cfg, w, (x,))
    assert (q.qvalue == nearest_by(matmul, cfg, w, x).qvalue).all()


def test_order_of_inputs_does_not_matter_by_decreasing_power():
    x, w = correlated(100, 24), weights(24, 8)
    order = np.random.default_rng(2).permutation(24)
    cfg = config_of(GRIDS["int4"])
    q = rounded_by(matmul, cfg, w, (x,))
    shuffled = rounded_by(matmul, cfg, w[order], (x[:, order],))
    assert (q.qvalue[order] == shuffled.qvalue).all()
    cfg = config_of(GRIDS["int4"], config.Gptq(act_order=False))
    q = rounded_by(matmul, cfg, w, (x,))
    shuffled = rounded_by(matmul, cfg, w[order], (x[:, order],))
    assert (q.qvalue[order] != shuffled.qvalue).any()


def test_inputs_that_are_always_zero():
    x, w = correlated(100, 24).at[:, 5:8].set(0), weights(24, 8)
    cfg = config_of(GRIDS["int4"])
    q = rounded_by(matmul, cfg, w, (x,))
    wanted = gptq(w, steps_of(q), moment(x))
    np.testing.assert_allclose(q.dequant(), wanted, rtol=1e-5, atol=1e-7)
    nearest = nearest_by(matmul, cfg, w, x)
    assert (q.qvalue[5:8] == nearest.qvalue[5:8]).all()
    assert (q.qvalue != nearest.qvalue).any()


def test_a_singular_moment_takes_more_damping_and_says_so():
    # Two equal inputs, and too little damping to tell them apart in float32.
    x = correlated(100, 24)
    x, w = jnp.concatenate([x, x], 1) * 100, weights(48, 8)
    reports = []
    cfg = config_of(GRIDS["int4"], config.Gptq(damping=1e-9))
    _, serving = converted(matmul, cfg, w, (x,), report=reports.append)
    (told,) = (one.rounding for one in reports[0].parameters)
    assert "rounded by GPTQ at conversion" in told
    assert "1 of 1 second moments of inputs were singular" in told
    assert told in str(reports[0])
    q = frozen(serving)
    assert error(x, w, q) < error(x, w, nearest_by(matmul, cfg, w, x))


@pytest.mark.parametrize("value", [jnp.nan, -jnp.inf])
def test_inputs_that_are_not_finite_enter_no_moment(value):
    x, w, cfg = correlated(100, 24), weights(24, 8), config_of(GRIDS["int4"])
    bad = x.at[3, 4].set(value)
    found, wanted = (
        frozen(converted(matmul, cfg, w, *batches)[1])
        for batches in (((x,), (bad,)), ((x,),))
    )
    np.testing.assert_array_equal(found.qvalue, wanted.qvalue)
    with pytest.raises(ValueError, match="have seen no batch"):
        converted(matmul, cfg, w, (bad,))


def test_moments_that_are_not_finite_are_an_error():
    one = SecondMoment(jnp.float32(1), jnp.full((1, 2, 2), jnp.nan))
    message = r"1 of 1 second moments .* NaN or infinities: those in .*head.*moment"
    with pytest.raises(ValueError, match=message):
        statistics_uses.check_gathered({"head": {"moment": one}}, "gather some")


def test_a_moment_that_was_cast_is_refused():
    cfg, x, w = config_of(GRIDS["int4"]), correlated(100, 24), weights(24, 8)
    fn_q = aqtlite.quantize_function(matmul, cfg, params=0)
    _, state = fn_q(fn_q.init_state(w, x), w, x)
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state)
    with pytest.raises(TypeError, match=r"fwd\.rhs\.rounding was .*s of bfloat16, wh"):
        aqtlite.convert_function(fn_q, w, x, state=cast)


def test_inputs_of_zeros_round_to_nearest_and_say_so(caplog):
    x, w, reports = jnp.zeros((100, 24)), weights(24, 8), []
    cfg = config_of(GRIDS["int4"])
    with caplog.at_level("WARNING", logger="absl"):
        _, serving = converted(matmul, cfg, w, (x,), report=reports.append)
    told = reports[0].parameters[0].rounding
    assert told.startswith("rounded to nearest instead of by GPTQ: 1 of 1 second mom")
    assert "moments of inputs are zero" in told and "are zero" in caplog.text
    assert (frozen(serving).qvalue == nearest_by(matmul, cfg, w, x).qvalue).all()


def test_some_inputs_of_zeros_are_told():
    x, w, reports = correlated(3, 100, 24).at[1].set(0), weights(3, 24, 8), []
    cfg = config_of(GRIDS["int4"])
    converted(batched, cfg, w, (x,), report=reports.append)
    told = reports[0].parameters[0].rounding
    assert told.startswith("rounded by GPTQ at conversion: 1 of 3 second moments of")


@pytest.mark.slow
@pytest.mark.code("users")
def test_the_conversion_and_what_is_served_are_always_the_same():
    x, w = correlated(100, 48), weights(48, 8)
    cfg = config_of(GRIDS["uint4"], blocks=config.Blocks(size=16))
    serve, serving = converted(matmul, cfg, w, (x,))
    _, again = converted(matmul, cfg, w, (x,))
    for one, other in zip(
        jax.tree.leaves(serving), jax.tree.leaves(again), strict=True
    ):
        assert (one == other).all()
    assert (jax.jit(serve)(serving, x) == serve(serving, x)).all()
    # Nothing of the statistics is served.
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(serving)) < w.nbytes


def batched(w, x):
    return jnp.einsum("bti,bio->bto", x, w)


def several_axes(w, x):
    return jnp.einsum("tij,jio->to", x, w)


def test_a_matrix_for_each_batch_index():
    x, w = correlated(2, 90, 16), weights(2, 16, 5)
    q = rounded_by(batched, config_of(GRIDS["int4"]), w, (x,))
    for i in range(2):
        wanted = gptq(w[i], steps_of(q)[i], moment(x[i]))
        np.testing.assert_allclose(q.dequant()[i], wanted, rtol=1e-5, atol=1e-7)


def test_several_contracting_axes():
    x, w = correlated(90, 24).reshape(90, 4, 6), weights(6, 4, 5)
    q = rounded_by(several_axes, config_of(GRIDS["int4"]), w, (x,))

    def rows(y):
        return np.asarray(y).swapaxes(0, 1).reshape(24, *y.shape[2:])

    wanted = gptq(rows(w), rows(steps_of(q)), moment(x.reshape(90, 24)))
    np.testing.assert_allclose(rows(q.dequant()), wanted, rtol=1e-5, atol=1e-7)


def test_weights_on_the_left():
    x, w = correlated(90, 16), weights(5, 16)
    q = rounded_by(lambda w, x: w @ x.T, config_of(GRIDS["int4"]), w, (x,))
    wanted = gptq(w.T, steps_of(q).swapaxes(0, 1), moment(x))
    np.testing.assert_allclose(q.dequant().T, wanted, rtol=1e-5, atol=1e-7)


def test_padded_blocks():
    x, w = correlated(90, 20), weights(20, 5)
    cfg = config_of(GRIDS["uint4"], blocks=config.Blocks(size=16, pad=True))
    serve, serving = converted(matmul, cfg, w, (x,))
    q = nearest_by(matmul, cfg, w, x)
    assert (serve(serving, x) != x @ q.dequant()).any()
    served = serve(serving, jnp.eye(20))
    wide = jnp.pad(w, ((0, 12), (0, 0)))
    whole = config_of(GRIDS["uint4"], blocks=config.Blocks(size=16))
    found = rounded_by(matmul, whole, wide, (jnp.pad(x, ((0, 0), (0, 12))),))
    np.testing.assert_allclose(served, found.dequant()[:20], rtol=1e-5, atol=1e-6)


def convolution(groups, w, x):
    return lax.conv_general_dilated(
        x, w, (2, 1), ((1, 0), (1, 1)), rhs_dilation=(1, 2),
        dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups,
    )  # fmt: skip


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions(groups):
    x, w = correlated(3, 7, 6, 4), weights(2, 2, 4 // groups, 6)
    fn = functools.partial(convolution, groups)
    q = rounded_by(fn, config_of(GRIDS["int4"]), w, (x,))
    padded = np.pad(x, ((0, 0), (1, 0), (1, 1), (0, 0)))
    patches = np.stack(
        [
            padded[n, 2 * i : 2 * i + 2, j : j + 3 : 2]
            for n in range(3)
            for i in range(4)
            for j in range(6)
        ]
    )
    for group in range(groups):
        features = slice(group * 4 // groups, (group + 1) * 4 // groups)
        outputs = slice(group * 6 // groups, (group + 1) * 6 // groups)
        h = moment(patches[..., features].reshape(len(patches), -1))
        rows = functools.partial(np.reshape, shape=(len(h), 6 // groups))
        values = steps_of(q)[:, :, :, outputs].reshape(len(h), 6 // groups, -1)
        wanted = gptq(rows(w[..., outputs]), values, h)
        found = rows(q.dequant()[..., outputs])
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)


def experts(w, x, sizes):
    return lax.ragged_dot(x, w, sizes)


def test_a_matrix_for_each_expert():
    x, w, sizes = correlated(100, 16), weights(3, 16, 5), jnp.array([60, 0, 30])
    reports = []
    cfg = config_of(GRIDS["int4"])
    _, serving = converted(experts, cfg, w, (x, sizes), report=reports.append)
    q = frozen(serving)
    for i, rows in ((0, x[:60]), (2, x[60:90])):
        wanted = gptq(w[i], steps_of(q)[i], moment(rows))
        np.testing.assert_allclose(q.dequant()[i], wanted, rtol=1e-5, atol=1e-7)
    nearest = nearest_by(experts, cfg, w, x, sizes)
    assert (q.qvalue[1] == nearest.qvalue[1]).all()


def test_layers_of_a_scan():
    def layers(w, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    x, w = correlated(90, 16), weights(2, 16, 16)
    q = rounded_by(layers, config_of(GRIDS["int4"]), w, (x,))
    wanted = gptq(w[0], steps_of(q)[0], moment(x))
    np.testing.assert_allclose(q.dequant()[0], wanted, rtol=1e-5, atol=1e-7)


def test_activations_are_not_rounded():
    def scores(w, x):
        return jnp.einsum("bqk,bsk->bqs", x @ w, x)

    x, w = correlated(2, 9, 16), weights(16, 16)
    planned = aqtlite.plan(scores, w, x, rules=config_of(GRIDS["int4"]), params=0)
    first, second = planned.contractions
    assert first.cfg.fwd.rhs.rounding == HOW
    assert second.cfg.fwd.rhs.rounding is None
    assert "rounded by GPTQ at conversion" in repr(planned)
    converted(scores, config_of(GRIDS["int4"]), w, (x,), (x[:1],))


def test_statistics_of_several_hosts():
    x, w = correlated(100, 16), weights(16, 5)
    cfg, dims = config_of(GRIDS["int4"]), (((1,), (0,)), ((), ()))
    fresh = aqtlite.statistics.init_states(cfg, x, w, dims)
    update = functools.partial(aqtlite.statistics.update_states, cfg)
    one, other = (update(fresh, part, w, dims) for part in (x[:30], x[30:]))
    merged = aqtlite.statistics.merge_states(cfg, one, other)
    np.testing.assert_allclose(merged.moment.moment[0], moment(x), rtol=1e-4)
    assert merged.moment.batches == 2


def test_calls_do_without_statistics():
    x, w = correlated(100, 16), weights(16, 5)
    cfg = config_of(GRIDS["int4"])
    nearest = aqtlite.make_dot_general(config.update(cfg, {"fwd.rhs.rounding": None}))
    dims = (((1,), (0,)), ((), ()))
    assert (aqtlite.make_dot_general(cfg)(x, w, dims) == nearest(x, w, dims)).all()


def test_errors():
    x, w = correlated(100, 16), weights(16, 5)
    cfg = config_of(GRIDS["int4"])
    fn_q = aqtlite.quantize_function(matmul, cfg, params=0)
    state = fn_q.init_state(w, x)
    with pytest.raises(ValueError, match="have seen no batch"):
        aqtlite.convert_function(fn_q, w, x, state=state)
    with pytest.raises(ValueError, match="there are no statistics"):
        aqtlite.convert_function(fn_q, w, x, state={})
    _, state = fn_q(state, w, x)
    with pytest.raises(ValueError, match=r"of shape \(1, 16, 16\)"):
        fn_q(state, weights(20, 5), correlated(9, 20))


def test_what_cannot_be_rounded_is_refused():
    def grouped(w, x):
        return lax.conv_general_dilated(x, w, (1,), "SAME", batch_group_count=2)

    x, w = weights(4, 3, 8), weights(6, 3, 2)
    with pytest.raises(ValueError, match="batch_group_count=2 are not rounded"):
        aqtlite.plan(grouped, w, x, rules=config_of(GRIDS["int4"]), params=0)
