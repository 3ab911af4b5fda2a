"""N:M sparsity of weights, in every operation, alone and within GPTQ."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import aqtlite
from aqtlite import calibration, config, numerics
from tests.common import MATMUL, assert_same, nearest, normal, quick_jit
from tests.quantization.test_gptq import (
    converted,
    correlated,
    frozen,
    matmul,
    moment,
    nearest_by,
    rounded_by,
    steps_of,
    weights,
)

pytestmark = pytest.mark.code("quick")

PATH = "fwd.rhs.sparsity"
FREE = config.NofM(2, 4, decay=0.0)
INT8 = nearest(8)
SPARSE = config.update(INT8, {PATH: FREE})


def kept(magnitude, n, m, axis=0):
    """Where the n largest of m consecutive elements are, one group after the other."""
    rows = np.moveaxis(np.abs(magnitude), axis, -1)
    result = np.zeros(rows.shape, bool)
    for index in np.ndindex(rows.shape[:-1]):
        for start in range(0, rows.shape[-1], m):
            order = np.argsort(-rows[index][start : start + m], kind="stable")
            result[index][start + order[:n]] = True
    return np.moveaxis(result, -1, axis)


def pruned(w, n=2, m=4, axis=0):
    return jnp.where(kept(w, n, m, axis), w, 0)


@pytest.mark.parametrize(
    ("n", "m", "size"), [(2, 4, 16), (1, 4, 12), (3, 5, 12), (1, 2, 7), (5, 8, 5)]
)
def test_keeps_the_largest_of_each_group(n, m, size):
    # Of so few numbers, many are equal, and some 0.
    x = np.random.default_rng(0).integers(-3, 4, (size, 300)).astype(np.float32)
    dense = config.Tensor(numerics=numerics.IntSymmetric(bits=8))
    sparse = config.update(dense, {"sparsity": config.NofM(n, m)})
    q = aqtlite.quantize(jnp.asarray(x), sparse, 0)
    # The range is that of the elements that are kept.
    wanted = aqtlite.quantize(jnp.asarray(pruned(x, n, m)), dense, 0)
    assert_same(q, wanted)
    assert ((np.asarray(q.qvalue) != 0) <= kept(x, n, m)).all()


@pytest.mark.parametrize(
    "grid",
    [
        numerics.IntAffine(bits=4),
        numerics.NormalFloat(bits=4),
        numerics.Float.from_dtype("float4_e2m1fn"),
    ],
    ids=lambda grid: grid.name,
)
def test_zeros_are_zeros_on_every_grid(grid):
    x = normal((32, 6)) + 1
    how = calibration.MinMax() if grid.zero_point_range else calibration.AbsMax()
    tensor = config.Tensor(
        numerics=grid,
        calibration=how,
        blocks=config.Blocks(size=10, pad=True),
        sparsity=config.NofM(2, 4),
    )
    found = aqtlite.quantize(x, tensor, 0).dequant()
    assert (found[~kept(x, 2, 4)] == 0).all()
    assert (found[kept(x, 2, 4)] != 0).any()


def test_infinities_and_nan_are_kept():
    w = normal((8, 3)).at[5, 0].set(jnp.nan).at[6, 1].set(-jnp.inf)
    x = jnp.ones((2, 8))
    out = aqtlite.make_dot_general(SPARSE)(x, w, MATMUL)
    assert jnp.isnan(out[:, :2]).all() and jnp.isfinite(out[:, 2]).all()


def dot(cfg, x, w):
    return aqtlite.make_dot_general(cfg)(x, w, MATMUL)


def einsum(cfg, x, w):
    return aqtlite.einsum("bhd,mhd->bm", x, w, cfg=cfg)


def conv(groups, cfg, x, w):
    return aqtlite.make_conv_general_dilated(cfg)(
        x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=groups,
    )  # fmt: skip


def experts(cfg, x, w):
    return aqtlite.make_ragged_dot(cfg)(x, w, jnp.array([4, 0, 5]))


# Each with the shapes of its operands, and the axis of the groups.
OPERATIONS = {
    "dot_general": (dot, (6, 24), (24, 5), 0),
    "einsum": (einsum, (6, 2, 10), (5, 2, 10), 2),
    "conv": (functools.partial(conv, 1), (2, 9, 8), (3, 8, 6), 1),
    "grouped conv": (functools.partial(conv, 2), (2, 9, 16), (3, 8, 6), 1),
    "depthwise conv": (functools.partial(conv, 8), (2, 9, 8), (3, 1, 8), 1),
    "ragged_dot": (experts, (9, 16), (3, 16, 5), 1),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_contractions_and_their_gradients_take_pruned_weights(name):
    run, x_shape, w_shape, axis = OPERATIONS[name]
    x, w = normal(x_shape), normal(w_shape, 1)

    @functools.partial(quick_jit, static_argnums=0)
    def all_of(cfg, x, w):
        out, vjp = jax.vjp(functools.partial(run, cfg), x, w)
        return out, *vjp(jnp.cos(out))

    # The gradient of the weights passes to all of them.
    assert_same(all_of(SPARSE, x, w), all_of(INT8, x, pruned(w, axis=axis)))
    weight_only = config.weight_only(8)
    sparse = config.update(weight_only, {PATH: FREE})
    wanted = all_of(weight_only, x, pruned(w, axis=axis))
    assert_same(all_of(sparse, x, w), wanted)
    out, dx, dw = all_of(config.update(sparse, {f"{PATH}.decay": 0.25}), x, w)
    assert_same((out, dx), wanted[:2])
    assert_same(dw, wanted[2] + 0.25 * jnp.where(kept(w, 2, 4, axis), 0, w))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes(dtype):
    x, w = normal((6, 24)).astype(dtype), normal((24, 5), 1).astype(dtype)
    got = dot(SPARSE, x, w)
    assert got.dtype == dtype
    assert_same(got, dot(INT8, x, pruned(w)))


def assert_sparse(q):
    assert ((np.asarray(q.qvalue) != 0).reshape(4, 4, 5).sum(1) <= 2).all()


def test_rotated_weights_are_pruned():
    """After that: the integers, which are frozen, are sparse."""
    x, w = normal((6, 16)), normal((16, 5), 1)
    changes = {"fwd.rotation": config.Hadamard(), PATH: FREE}
    cfg = config.update(config.fully_quantized(bwd_bits=None), changes)
    fn_q = aqtlite.quantize_function(matmul, cfg, params=0)
    serve, serving = aqtlite.convert_function(fn_q, w, x)
    assert_sparse(frozen(serving))
    assert_same(serve(serving, x), dot(cfg, x, w))


def test_smoothed_weights_are_pruned():
    x, w = normal((6, 16)) * jnp.arange(1, 17), normal((16, 5), 1)
    cfg = config.update(config.smoothquant(bwd_bits=None), {PATH: FREE})
    _, serving = converted(matmul, cfg, w, (x,))
    assert_sparse(frozen(serving))
    # Inputs count as much as they multiply.
    dense = config.update(cfg, {PATH: None})
    apart = frozen(converted(matmul, dense, pruned(w), (x,))[1])
    assert ((apart.qvalue == 0) != (frozen(serving).qvalue == 0)).any()


def test_learned_scales_start_from_what_is_pruned():
    x, w = normal((6, 16)), normal((16, 5), 1)
    lsq = config.lsq_weight_only(4)
    starts = [
        aqtlite.statistics.init_states(cfg, x, one, MATMUL).rhs
        for cfg, one in ((config.update(lsq, {PATH: FREE}), w), (lsq, pruned(w)))
    ]
    assert_same(*starts)


def test_a_mesh_with_explicit_axes():
    explicit = jax.sharding.AxisType.Explicit
    mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(explicit,))
    sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    w = jax.ShapeDtypeStruct((12, 6), jnp.float32, sharding=sharding)
    tensor = config.Tensor(numerics=numerics.IntSymmetric(bits=8), sparsity=FREE)
    with jax.sharding.use_abstract_mesh(mesh):
        q = jax.eval_shape(lambda w: aqtlite.quantize(w, tensor, 0), w)
    assert q.shape == (12, 6)


def test_grids_without_a_zero():
    grid = numerics.IntSymmetric(bits=2, preserve_zero=False)
    cfg = config.update(config.weight_only(), {"fwd.rhs.numerics": grid, PATH: FREE})
    with pytest.raises(ValueError, match=r"has no zero for the weights that fwd\.rhs"):
        dot(cfg, normal((6, 16)), normal((16, 5), 1))


GPTQ = config.update(
    config.weight_only(),
    {
        "fwd.rhs.numerics": numerics.IntSymmetric(bits=4),
        "fwd.rhs.rounding": config.Gptq(),
        PATH: FREE,
    },
)


def sparse_gptq(w, values, h, sets, n, damping=0.01, act_order=True):
    """SparseGPT with rounding: the rows of w, of which n in each set are not 0."""
    w, h = np.array(w, np.float64), np.array(h, np.float64)
    power = np.diag(h)
    sets = [list(one) for one in sets]
    if act_order:
        sets.sort(key=lambda one: -power[one].sum())
    order = np.concatenate(sets)
    h = h + damping * power.mean() * np.eye(len(h))
    u = np.linalg.cholesky(np.linalg.inv(h[order][:, order])).T
    w, values, result = w[order], values[order], np.empty_like(w)
    start = 0
    for size in map(len, sets):
        of_set = slice(start, start + size)
        price = np.abs(w[of_set]) / np.diag(u)[of_set, None]
        keep = kept(price, n, size)
        for i in range(start, start + size):
            nearest = np.abs(values[i] - w[i][:, None]).argmin(-1)
            rounded = np.take_along_axis(values[i], nearest[:, None], -1)[:, 0]
            rounded = np.where(keep[i - start], rounded, 0)
            result[order[i]] = rounded
            w[i + 1 :] -= np.outer(u[i, i + 1 :], (w[i] - rounded) / u[i, i])
        start += size
    return result


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("n", "m", "size"), [(2, 4, 40), (2, 3, 40)])
def test_gptq_prunes_as_the_paper_does(n, m, size, act_order):
    x, w = correlated(300, size), weights(size, 7)
    how = config.Gptq(act_order=act_order)
    changes = {PATH: config.NofM(n, m), "fwd.rhs.rounding": how}
    q = rounded_by(matmul, config.update(GPTQ, changes), w, (x,))
    sets = [range(i, min(i + m, size)) for i in range(0, size, m)]
    wanted = sparse_gptq(w, steps_of(q), moment(x), sets, n, act_order=act_order)
    np.testing.assert_allclose(q.dequant(), wanted, rtol=1e-5, atol=1e-7)


def test_gptq_prunes_features_of_convolutions():
    def fn(w, x):
        dims = ("NWC", "WIO", "NWC")
        return lax.conv_general_dilated(x, w, (1,), "VALID", dimension_numbers=dims)

    x, w = correlated(20, 7, 8), weights(2, 8, 6)
    q = rounded_by(fn, GPTQ, w, (x,))
    patches = np.stack([np.asarray(x[:, i : i + 2]) for i in range(6)]).reshape(-1, 16)
    values = steps_of(q).reshape(16, 6, -1)
    sets = [range(start, start + 4) for start in (0, 4, 8, 12)]
    # Inputs in the order of the kernel: positions, then features.
    wanted = sparse_gptq(w.reshape(16, 6), values, moment(patches), sets, 2)
    np.testing.assert_allclose(q.dequant().reshape(16, 6), wanted, rtol=1e-5, atol=1e-7)


def test_outputs_are_nearer_than_those_of_weights_pruned_by_magnitude():
    x, w = correlated(512, 300, rank=64), weights(300, 16)
    reports = []
    _, serving = converted(matmul, GPTQ, w, (x[:384],), report=reports.append)
    assert "frozen, 2:4 sparse, rounded by GPTQ at conversion" in str(reports[0])
    q = frozen(serving)
    assert ((q.qvalue != 0).reshape(75, 4, 16).sum(1) <= 2).all()
    nearest_cfg = config.update(GPTQ, {"fwd.rhs.rounding": None})
    by_magnitude = nearest_by(matmul, nearest_cfg, w, x)

    def error(w_q):
        return float(jnp.linalg.norm(x[384:] @ (w_q - w)))

    dense = config.update(GPTQ, {PATH: None})
    apart = rounded_by(matmul, dense, pruned(w), (x[:384],)).dequant()
    assert error(q.dequant()) < 0.7 * error(by_magnitude.dequant())
    assert error(q.dequant()) < 0.9 * error(apart)


def test_activations_are_not_pruned():
    def scores(w, x):
        return jnp.einsum("bqk,bsk->bqs", x @ w, x)

    x, w = normal((2, 9, 16)), normal((16, 16), 1)
    planned = aqtlite.plan(scores, w, x, rules=SPARSE, params=0)
    first, second = planned.contractions
    assert first.cfg.fwd.rhs.sparsity == FREE
    assert second.cfg.fwd.rhs.sparsity is None
    assert "int8 x int8, 2:4 sparse" in repr(planned)


def test_the_plan_names_what_is_too_small_to_be_pruned():
    planned = aqtlite.plan(
        lambda w, x: conv(8, None, x, w),
        normal((3, 1, 8)),
        normal((2, 9, 8)),
        rules=SPARSE,
        params=0,
    )
    assert "not sparse: all inputs of a group are kept" in repr(planned)


def test_gptq_leaves_depthwise_convolutions_dense():
    def fn(w, x):
        return conv(8, None, x, w)

    x, w = correlated(20, 7, 8), weights(3, 1, 8)
    dense = config.update(GPTQ, {PATH: None})
    reports = []
    _, serving = converted(fn, GPTQ, w, (x,), report=reports.append)
    assert "sparse" not in str(reports[0])
    wanted = rounded_by(fn, dense, w, (x,))
    np.testing.assert_array_equal(frozen(serving).qvalue, wanted.qvalue)
