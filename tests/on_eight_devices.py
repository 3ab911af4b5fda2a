"""Tests that need several devices, which `test_sharding.py` runs on simulated ones."""

import contextlib
import dataclasses
import functools
import pathlib
import re
import runpy

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, serialization
from jax import lax, shard_map
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import aqtlite
from aqtlite import (
    calibration,
    checkpoint,
    config,
    kv_cache,
    lowering,
    noise,
    numerics,
    statistics,
)
from aqtlite.flax import (
    AqtDotGeneral,
    calibrate,
    convert,
    correct_biases,
    quantize_model,
    widen_int4,
)
from aqtlite.flax import nnx as aqt_nnx
from aqtlite.reporting import collectives
from benchmarks.collectives import serving, strategies, training
from benchmarks.harness import contestants
from tests.common import MATMUL, nearest, normal

X, W = normal((8, 16)), normal((16, 12), 1)
G = normal((8, 12), 2)
DOTS = {
    name: aqtlite.make_dot_general(cfg)
    for name, cfg in {
        "float": None,
        "int8": nearest(),
        "int8_afresh": nearest(use_fwd_quant=False),
        "weight_only": config.weight_only(),
    }.items()
}
each_dot = pytest.mark.parametrize("dot", DOTS.values(), ids=DOTS)
each_kind = pytest.mark.parametrize("dot", [DOTS["int8"], DOTS["weight_only"]])
STOCHASTIC = aqtlite.make_dot_general(config.fully_quantized())


def mesh_of(*types):
    return jax.make_mesh((2, 4), ("d", "m"), axis_types=types)


AUTO = mesh_of(AxisType.Auto, AxisType.Auto)
EXPLICIT = mesh_of(AxisType.Explicit, AxisType.Explicit)
MIXED = mesh_of(AxisType.Explicit, AxisType.Auto)


def loss(dot, x, w, g=G):
    return jnp.sum(dot(x, w, MATMUL) * g)


def of_halves(function, *args):
    """What a function of rows gives for either half of them."""
    halves = [jax.tree.map(lambda x, i=i: jnp.split(x, 2)[i], args) for i in range(2)]
    return [function(*half) for half in halves]


def assert_equal(got, wanted):
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


# --- Inside shard_map --------------------------------------------------------------


def test_shard_map_in_a_model_with_a_key():
    """Noise inside has no seeds of the key."""

    class Sharded(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel = self.param("kernel", nn.initializers.ones, (16, 16))
            specs = {"in_specs": (P("d"), P()), "out_specs": P("d")}
            return shard_map(jnp.matmul, mesh=AUTO, **specs)(nn.Dense(16)(x), kernel)

    model = quantize_model(Sharded(), config.fully_quantized())
    variables = model.init(jax.random.key(0), X)

    def loss(variables, **kwargs):
        return (model.apply(variables, X, **kwargs) ** 2).sum()

    key = jax.random.key(1)
    assert loss(variables, rngs={"aqt": key}) == loss(variables)
    jax.grad(loss)(variables, rngs={"aqt": key})


def over_rows(dot, **kwargs):
    """Each half of the rows of lhs is contracted by itself."""
    return shard_map(
        lambda x, w: dot(x, w, MATMUL),
        mesh=AUTO,
        in_specs=(P("d"), P()),
        out_specs=P("d"),
        **kwargs,
    )


def halves_contracted(dot):
    return jnp.concatenate(of_halves(jax.jit(lambda x: dot(x, W, MATMUL)), X))


@pytest.mark.parametrize("check_vma", [True, False])
@each_dot
def test_shard_map(dot, check_vma):
    mapped = over_rows(dot, check_vma=check_vma)
    assert_equal(jax.jit(mapped)(X, W), halves_contracted(dot))


@pytest.mark.parametrize(
    ("name", "check_vma"),
    [("float", True), ("int8", True), ("int8", False), ("weight_only", True)],
)
def test_eager_shard_map(name, check_vma):
    mapped = over_rows(DOTS[name], check_vma=check_vma)
    assert_equal(mapped(X, W), halves_contracted(DOTS[name]))


@pytest.mark.parametrize(
    ("name", "jit"),
    [*((name, True) for name in DOTS), ("int8", False), ("weight_only", False)],
)
def test_gradient_of_a_replicated_weight(name, jit):
    """Summed over the devices that it was replicated on, around as inside."""
    dot = DOTS[name]
    own = jax.jit(jax.grad(functools.partial(loss, dot), (0, 1)))
    (dx, dw), (other_dx, other_dw) = of_halves(lambda x, g: own(x, W, g), X, G)

    def inside(x, w, g):
        return jax.grad(functools.partial(loss, dot), (0, 1))(x, w, g)

    specs = P("d"), P(), P("d")
    mapped = shard_map(inside, mesh=AUTO, in_specs=specs, out_specs=specs[:2])
    got = (jax.jit(mapped) if jit else mapped)(X, W, G)
    assert_equal(got, (jnp.concatenate([dx, other_dx]), dw + other_dw))

    def around(x, w):
        one = shard_map(
            lambda x, w, g: lax.psum(loss(dot, x, w, g), "d"),
            mesh=AUTO,
            in_specs=specs,
            out_specs=P(),
        )
        return one(x, w, G)

    grad = jax.grad(around, (0, 1))
    assert_equal((jax.jit(grad) if jit else grad)(X, W), got)


@each_kind
def test_gradients_of_a_contraction_that_is_cut(dot):
    """Each device contracts a part of the products, with scales of its own."""

    def whole(x, w):
        parts = shard_map(
            lambda x, w: lax.psum(dot(x, w, MATMUL), "m"),
            mesh=AUTO,
            in_specs=(P("d", "m"), P("m")),
            out_specs=P("d"),
        )(x, w)
        return jnp.sum(parts * G)

    def in_parts(x, w):
        xs, ws = jnp.split(x, 4, axis=1), jnp.split(w, 4)
        return sum(loss(dot, x, w) for x, w in zip(xs, ws, strict=True))

    for got, wanted in zip(
        jax.jit(jax.grad(whole, (0, 1)))(X, W),
        jax.jit(jax.grad(in_parts, (0, 1)))(X, W),
        strict=True,
    ):
        # The scale of drhs is that of a half here, and of all rows there.
        np.testing.assert_allclose(got, wanted, atol=0.02 * jnp.abs(wanted).max())


@each_kind
def test_vmap_inside_and_around(dot):
    xs = normal((3, 8, 16), 4)
    specs = {"mesh": AUTO, "in_specs": (P("d"), P()), "out_specs": P("d")}

    def run(x, w):
        return jax.grad(lambda x: jnp.sum(jnp.sin(dot(x, w, MATMUL))))(x)

    around = jax.vmap(shard_map(run, **specs), (0, None))
    inside = shard_map(
        jax.vmap(run, (0, None)),
        mesh=AUTO,
        in_specs=(P(None, "d"), P()),
        out_specs=P(None, "d"),
    )
    alone = jax.jit(shard_map(run, **specs))
    wanted = [alone(x, W) for x in xs]
    for mapped in (jax.jit(around), jax.jit(inside)):
        np.testing.assert_allclose(mapped(xs, W), jnp.stack(wanted), rtol=1e-5)


@each_kind
def test_scan_inside(dot):
    layers = normal((3, 16, 16), 5)

    def run(x, layers):
        def layer(x, w):
            return jnp.tanh(dot(x, w, MATMUL)), None

        return jnp.sum(lax.scan(layer, x, layers)[0])

    grad = jax.grad(run, (0, 1))
    mapped = shard_map(grad, mesh=AUTO, in_specs=(P("d"), P()), out_specs=(P("d"), P()))
    (dx, dw), (other_dx, other_dw) = of_halves(lambda x: jax.jit(grad)(x, layers), X)
    got = jax.jit(mapped)(X, layers)
    assert_equal(got, (jnp.concatenate([dx, other_dx]), dw + other_dw))


@pytest.mark.parametrize(
    ("examples", "shape", "kernel"),
    [
        (4, (8, 8), (3, 3, 1, 6)),  # Depthwise.
        (64, (32, 32), (3, 3, 6, 64)),  # Of which the windows are cut into blocks.
    ],
)
def test_gradients_of_convolutions_inside(examples, shape, kernel):
    conv = aqtlite.make_conv_general_dilated(config.fully_quantized())
    features = 6

    def gradients(x, w):
        def convolved(x, w):
            return conv(
                *(x, w, (1, 1), "SAME"),
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=features // kernel[2],
            )

        # That of a weight that does not vary would be summed.
        (w,) = w
        out, vjp = jax.vjp(convolved, x, w)
        gradient_of_x, gradient_of_w = vjp(jnp.cos(out))
        return gradient_of_x, gradient_of_w[None]

    x, w = normal((examples, *shape, features)), normal(kernel, 1)
    args = x, jnp.stack([w, w])
    inside = shard_map(gradients, mesh=AUTO, in_specs=P("d"), out_specs=P("d"))
    wanted = jax.tree.map(
        lambda *halves: jnp.concatenate(halves), *of_halves(jax.jit(gradients), *args)
    )
    for got, one in zip(jax.jit(inside)(*args), wanted, strict=True):
        np.testing.assert_allclose(got, one, rtol=1e-5, atol=1e-5)


@each_kind
def test_some_axes_manual(dot):
    """The others stay XLA's to partition."""
    grad = jax.grad(functools.partial(loss, dot), (0, 1))
    specs = P("d"), P(), P("d")
    mapped = jax.jit(
        shard_map(
            grad, mesh=AUTO, in_specs=specs, out_specs=specs[:2], axis_names={"d"}
        )
    )
    wanted = mapped(X, W, G)
    by_column = jax.device_put(W, NamedSharding(AUTO, P(None, "m")))
    got = mapped(X, by_column, G)
    halves = of_halves(lambda x, g: jax.jit(grad)(x, W, g), X, G)
    assert_equal(wanted[0], jnp.concatenate([dx for dx, _ in halves]))
    for one, other in zip(got, wanted, strict=True):
        # A float contraction may be summed in another order.
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_stochastic_gradients_inside():
    def mean(x, w):
        out = STOCHASTIC(x, w, MATMUL)
        return lax.pmean(jnp.sum(jnp.sin(out)), "d")

    mapped = shard_map(
        jax.grad(mean, 1), mesh=AUTO, in_specs=(P("d"), P()), out_specs=P()
    )
    exact = jax.grad(lambda w: jnp.sum(jnp.sin(X @ w)) / 2)(W)
    for got in (mapped(X, W), jax.jit(mapped)(X, W)):
        assert jnp.linalg.norm(got - exact) < 0.05 * jnp.linalg.norm(exact)


# --- KV caches ---------------------------------------------------------------------


def cached(cfg, cache, key, value, query):
    """Attention to sequences that were cut off, of which new positions are written."""
    cache = kv_cache.append(cache, key, value, cfg)
    cache = kv_cache.truncate(cache, jnp.array([2, 1, 3, 2]))
    cache = kv_cache.append(cache, key[:, :1], value[:, :1], cfg)
    return kv_cache.attend(query, cache, cfg)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize(
    ("mesh", "spec", "of_cache"),
    [
        # As XLA chooses where there are fewer heads than devices.
        (AUTO, P("d", None, None, "m"), P()),
        (EXPLICIT, P("d", None, "m"), P("d", "m")),
    ],
)
def test_kv_caches(mesh, spec, of_cache, bits, groups):
    cfg = kv_cache.config_for(bits)
    if groups > 1:
        cfg = config.update(cfg, {"fwd.rhs.blocks": config.Blocks(count=groups)})
    arrays = [normal((4, size, 4, 16), size) for size in (5, 5, 1)]
    cache = kv_cache.empty((4, 6, 4, 16), "float32", cfg)
    attend = jax.jit(functools.partial(cached, cfg))
    wanted = attend(cache, *arrays)
    with jax.set_mesh(mesh):
        arrays = jax.device_put(arrays, NamedSharding(mesh, spec))
        cache = jax.tree.map(
            lambda x: jax.device_put(
                x, NamedSharding(mesh, of_cache if x.ndim else P())
            ),
            cache,
        )
        got = attend(cache, *arrays)
    np.testing.assert_allclose(jax.device_get(got), wanted, atol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("bits", [8, 4, 3])
def test_kv_caches_that_are_made_inside_shard_map(bits, window, check_vma):
    """What is written varies, and what is written to does not."""
    cfg = kv_cache.config_for(bits)
    arrays = [normal((4, size, 4, 16), size) for size in (5, 5, 1)]

    def attend(*arrays):
        shape = len(arrays[0]), 6, 4, 16
        cache = kv_cache.empty(shape, "float32", cfg, window=window)
        cache = kv_cache.append(cache, *(x[:, :3] for x in arrays[:2]), cfg)
        cache = kv_cache.append(cache, *(x[:, 3:4] for x in arrays[:2]), cfg)
        return kv_cache.attend(arrays[2], cache, cfg)

    specs = {"in_specs": P("d"), "out_specs": P("d"), "check_vma": check_vma}
    got = jax.jit(shard_map(attend, mesh=AUTO, **specs))(*arrays)
    wanted = jnp.concatenate(of_halves(jax.jit(attend), *arrays))
    np.testing.assert_allclose(got, wanted, atol=1e-6)


# --- Shardings that are part of the type -------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "tiles", "use_fwd_quant"),
    [
        *((EXPLICIT, tiles, reuse) for tiles in (None, 2) for reuse in (True, False)),
        (MIXED, None, True),
        (MIXED, 2, False),
    ],
)
def test_explicit_axes(mesh, tiles, use_fwd_quant):
    """Gradients are sharded as their operands, and the same as on one device."""
    local = tiles and config.LocalAqt(contraction_axis_shard_count=tiles)
    cfg = config.update(
        nearest(use_fwd_quant=use_fwd_quant),
        {"dlhs.local_aqt": local, "drhs.local_aqt": local},
    )
    dot = aqtlite.make_dot_general(cfg)
    grad = jax.jit(jax.grad(functools.partial(loss, dot), (0, 1)))
    wanted = grad(X, W)
    cases = [(P("d", None), P(None, None)), (P(None, None), P("d", None))]
    if mesh is EXPLICIT:
        cases += [(P("d", None), P(None, "m")), (P("d", "m"), P(None, None))]
    with jax.set_mesh(mesh):
        for specs in cases:
            args = jax.device_put(
                (X, W, G), tuple(NamedSharding(mesh, s) for s in (*specs, P("d")))
            )
            got = grad(*args[:2])
            assert [jax.typeof(x).sharding.spec for x in got] == list(specs)
            assert_equal(jax.device_get(got), jax.device_get(wanted))
    # Of the last of them, the mesh is known by the arguments alone.
    assert_equal(jax.device_get(grad(*args[:2])), jax.device_get(wanted))


@pytest.mark.parametrize(
    ("of_x", "of_w", "of_result"),
    [
        (P("d"), P(None, "d"), P("d")),  # FSDP over output features.
        (P("d"), P(None, "m"), P("d")),
        (P("d"), P(None, "d"), P(None, "m")),
        (P(None, "m"), P("m"), P("d")),
        (P("d", "m"), P(), P(None, "d")),
    ],
)
def test_results_and_operands_along_other_explicit_axes(of_x, of_w, of_result):
    """Scales and seeds of one operand meet the other, and the result."""

    def both(x, w, g, sharding=None):
        out, pull = jax.vjp(
            lambda x, w: STOCHASTIC(x, w, MATMUL, out_sharding=sharding), x, w
        )
        return out, pull(g)

    wanted = jax.device_get(jax.jit(both)(X, W, G))
    with jax.set_mesh(EXPLICIT):
        specs = of_x, of_w, of_result
        shardings = tuple(NamedSharding(EXPLICIT, spec) for spec in specs)
        args = jax.device_put((X, W, G), shardings)
        got = jax.jit(functools.partial(both, sharding=of_result))(*args)
    assert_equal(jax.device_get(got), wanted)


@pytest.mark.parametrize("source", [noise.CounterHash(), noise.JaxRandom()], ids=str)
@pytest.mark.parametrize("blocks", [None, config.Blocks(size=2)], ids=["", "blocks"])
def test_the_noise_of_explicit_axes(source, blocks):
    grid = config.fully_quantized().dlhs.lhs.numerics
    tensor = config.Tensor(numerics=grid, noise=source, blocks=blocks)
    rounded = jax.jit(lambda x: aqtlite.quantize(x, tensor, 1).qvalue)
    wanted = jax.device_get(rounded(X))
    with jax.set_mesh(EXPLICIT):
        got = rounded(jax.device_put(X, NamedSharding(EXPLICIT, P("d", "m"))))
    np.testing.assert_array_equal(jax.device_get(got), wanted)


def test_batches_of_which_one_operand_is_sharded():
    dims = (((2,), (1,)), ((0,), (0,)))
    x, w = normal((4, 8, 16)), normal((4, 16, 12), 1)

    def both(x, w):
        dot = functools.partial(STOCHASTIC, dimension_numbers=dims)
        return dot(x, w), jax.grad(lambda x, w: dot(x, w).sum(), (0, 1))(x, w)

    wanted = jax.device_get(jax.jit(both)(x, w))
    with jax.set_mesh(EXPLICIT):
        shardings = (NamedSharding(EXPLICIT, spec) for spec in (P(None, "m"), P("m")))
        got = jax.jit(both)(*jax.device_put((x, w), tuple(shardings)))
    assert_equal(jax.device_get(got), wanted)


def test_blocks_along_explicit_axes():
    """Their scales are repeated on the devices of the axis."""
    fine, coarse = (
        config.Tensor(numerics=numerics.IntSymmetric(bits=8), blocks=blocks)
        for blocks in (config.Blocks(size=2), config.Blocks(size=4, remaining_size=3))
    )
    dots = [
        aqtlite.make_dot_general(cfg)
        for cfg in (
            config.DotGeneral(fwd=config.DotGeneralRaw(lhs=fine, rhs=coarse)),
            config.block_fp8(2),
        )
    ]

    def both(x, w):
        grads = jax.grad(functools.partial(loss, dots[1]), (0, 1))(x, w)
        return dots[0](x, w, MATMUL), grads

    wanted = jax.device_get(jax.jit(both)(X, W))
    specs = P("d", None), P(None, "m")
    with jax.set_mesh(EXPLICIT):
        got = jax.jit(both)(
            *jax.device_put((X, W), tuple(NamedSharding(EXPLICIT, s) for s in specs))
        )
        assert [jax.typeof(x).sharding.spec for x in got[1]] == list(specs)
    for one, other in zip(
        jax.tree.leaves(jax.device_get(got)), jax.tree.leaves(wanted), strict=True
    ):
        # Blocks are summed in another order.
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    "size", [4, 3], ids=["whole blocks on each device", "blocks across devices"]
)
def test_blocks_along_a_sharded_contracting_axis(mesh, size):
    """Devices exchange sums, and no operand where they have whole blocks."""
    blocks = config.Tensor(
        numerics=numerics.IntSymmetric(bits=8),
        blocks=config.Blocks(size=size, pad=True),
    )
    raw = config.DotGeneralRaw(lhs=blocks, rhs=blocks)
    dot = aqtlite.make_dot_general(config.DotGeneral(fwd=raw, dlhs=raw, drhs=raw))
    step = jax.jit(jax.value_and_grad(functools.partial(loss, dot), (0, 1)))
    wanted = jax.device_get(step(X, W))
    args = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in ((X, P("d", "m")), (W, P("m", None)))
    ]
    with jax.set_mesh(mesh):
        compiled = step.lower(*args).compile()
        got = jax.device_get(compiled(*args))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        # Blocks are summed in another order.
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    if size == 4:
        kinds = {one.op for one in collectives.of_text(compiled.as_text())}
        assert "all-reduce" in kinds, kinds
        assert not kinds & {"all-to-all", "collective-permute"}, kinds


@pytest.mark.parametrize("of_lhs", ["symmetric", "affine"])
@pytest.mark.parametrize("of_rhs", ["symmetric", "affine"])
@pytest.mark.parametrize("blocks", [None, config.Blocks(size=4)], ids=str)
def test_zero_points_along_explicit_axes(blocks, of_lhs, of_rhs):
    """The rows of lhs and the blocks of rhs are on devices of one axis (FSDP)."""
    kinds = {
        "symmetric": config.Tensor(numerics=numerics.IntSymmetric(bits=8)),
        "affine": config.Tensor(
            numerics=numerics.IntAffine(bits=8), calibration=calibration.MinMax()
        ),
    }
    lhs, rhs = (
        dataclasses.replace(kinds[kind], blocks=blocks) for kind in (of_lhs, of_rhs)
    )
    raw = config.DotGeneralRaw(lhs=lhs, rhs=rhs)
    cfg = config.DotGeneral(fwd=raw, dlhs=raw, drhs=raw)
    dot = aqtlite.make_dot_general(cfg)

    def both(x, w):
        of_examples = aqtlite.einsum("bk,km->mb", x, w, cfg=cfg)
        return of_examples, jax.value_and_grad(
            lambda x, w: jnp.sum(jnp.sin(dot(x, w, MATMUL))), (0, 1)
        )(x, w)

    wanted = jax.device_get(jax.jit(both)(X, W))
    with jax.set_mesh(EXPLICIT):
        for of_x, of_w in (("m", ("m",)), ("d", ("d", "m"))):
            args = jax.device_put(X, P(of_x)), jax.device_put(W, P(*of_w))
            got = jax.device_get(jax.jit(both)(*args))
            jax.tree.map(
                # Blocks are summed in another order.
                functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4),
                got,
                wanted,
            )


def test_zero_points_of_convolutions_along_explicit_axes():
    """Of examples, and sums of the kernel for features, on devices of one axis."""
    affine = config.Tensor(
        numerics=numerics.IntAffine(bits=8), calibration=calibration.MinMax()
    )
    conv = aqtlite.make_conv_general_dilated(
        config.update(config.qat(8), {"fwd.lhs": affine})
    )
    x, w = normal((8, 5, 6)), normal((8, 5, 3), 1)
    wanted = jax.jit(lambda x, w: conv(x, w, (1,), "SAME"))(x, w)
    with jax.set_mesh(EXPLICIT):
        args = jax.device_put((x, w), (P("m"), P("m")))
        for spec in (P("m"), P("d", "m")):
            run = jax.jit(
                lambda x, w, to=spec: conv(x, w, (1,), "SAME", out_sharding=to)
            )
            assert_equal(run(*args), wanted)


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("size", [4, None], ids=["on each device", "across devices"])
def test_rotations_along_a_sharded_contracting_axis(mesh, size):
    """Blocks that lie on one device stay there."""
    changes = {
        "fwd.rotation": config.Hadamard(size=size),
        "fwd.*.calib_shared_axes": "per_tensor",
    }
    dot = aqtlite.make_dot_general(config.update(config.qat(8), changes))
    run = jax.jit(lambda x, w: dot(x, w, MATMUL, out_sharding=out_sharding))
    out_sharding = None
    wanted = jax.device_get(run(X, W))
    args = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in ((X, P("d", "m")), (W, P("m", None)))
    ]
    out_sharding = NamedSharding(mesh, P("d")) if mesh is EXPLICIT else None
    with jax.set_mesh(mesh):
        compiled = run.lower(*args).compile()
        np.testing.assert_array_equal(jax.device_get(compiled(*args)), wanted)
    if size == 4:
        kinds = {one.op for one in collectives.of_text(compiled.as_text())}
        assert kinds == {"all-reduce"}, kinds


@pytest.mark.parametrize("spec", [P("d", None, None), P(None, "d", None)])
def test_noise_of_sharded_sequences(spec):
    x = normal((4, 8, 16), 6)
    grad = jax.jit(
        jax.grad(
            lambda w, x: jnp.sum(jnp.sin(STOCHASTIC(x, w, (((2,), (0,)), ((), ())))))
        )
    )
    wanted = grad(W, x)
    with jax.set_mesh(EXPLICIT):
        w = jax.device_put(W, NamedSharding(EXPLICIT, P(None, "m")))
        got = grad(w, jax.device_put(x, NamedSharding(EXPLICIT, spec)))
    assert_equal(jax.device_get(got), jax.device_get(wanted))


@pytest.mark.parametrize("named", [True, False])
def test_einsum_with_an_out_sharding(named):
    x = normal((4, 8, 16), 6)
    spec = P("m", None, "d")
    out_sharding = NamedSharding(EXPLICIT, spec) if named else spec
    with jax.set_mesh(EXPLICIT):
        args = (
            jax.device_put(x, NamedSharding(EXPLICIT, P("d", None, "m"))),
            jax.device_put(W, NamedSharding(EXPLICIT, P("m"))),
        )
        for cfg in (None, nearest()):
            einsum = functools.partial(aqtlite.einsum, "btk,kn->ntb", cfg=cfg)
            out = einsum(*args, out_sharding=out_sharding)
            assert jax.typeof(out).sharding.spec == spec
            np.testing.assert_allclose(
                jax.device_get(out), einsum(x, W), rtol=1e-5, atol=1e-5
            )


# --- Which form is chosen ----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Form(lowering.TargetDependent):
    """0 where arrays are whole, 1 where XLA partitions them."""

    def reference(self, x):
        return jnp.zeros(x.shape)

    def lowered(self, target, x):
        return jnp.full(x.shape, float(target.partitions > 1))


@pytest.mark.parametrize("map_", [lambda f: f, jax.vmap], ids=["alone", "vmap"])
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_form_by_partitions(map_, jit):
    mapped = map_(Form())
    rows = NamedSharding(AUTO, P("d"))
    assert_equal(jit(mapped)(X), 0 * X)
    assert_equal(jit(mapped)(jax.device_put(X, rows)), 0 * X + 1)
    specs = {"mesh": AUTO, "in_specs": P("d"), "out_specs": P("d")}
    assert_equal(jit(shard_map(mapped, **specs))(X), 0 * X)
    some = shard_map(mapped, axis_names={"d"}, **specs)
    assert_equal(jax.jit(some)(X), 0 * X + 1)


# --- Statistics of activations -----------------------------------------------------

STATISTICS = (
    calibration.MaxOverBatches(),
    calibration.MeanOverBatches(),
    calibration.PercentileOverBatches(95),
    calibration.Periodic(of=calibration.AbsMax(), period=2),
)


def test_statistics_of_batches_that_are_cut():
    """Under jit those of one device; what each device gathers merges to them."""
    lhs = config.Tensor(
        numerics=numerics.IntSymmetric(bits=8), calib_shared_axes="per_tensor"
    )
    raws = [
        config.DotGeneralRaw(lhs=dataclasses.replace(lhs, calibration=how))
        for how in STATISTICS
    ]
    cfgs = [config.DotGeneral(fwd=raw) for raw in raws]
    batches = jnp.stack([X, -3 * X, 2 * X])

    def gathered(batches):
        found = []
        for cfg in cfgs:
            states = statistics.init_states(cfg, X, W, MATMUL)
            for x in batches:
                states = statistics.update_states(cfg, states, x, W, MATMUL)
            found.append(states)
        return found

    cut = jax.device_put(batches, NamedSharding(AUTO, P(None, ("d", "m"))))
    wanted = jax.jit(gathered)(batches)
    assert_equal(jax.jit(gathered)(cut), wanted)

    def of_device(x):
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], gathered(x))

    axes = ("d", "m")
    mapped = shard_map(of_device, mesh=AUTO, in_specs=P(None, axes), out_specs=P(axes))
    each = jax.jit(mapped)(batches)
    devices = [jax.tree.map(lambda leaf, i=i: leaf[i], each) for i in range(8)]
    for i in (0, 2):
        merge = functools.partial(statistics.merge_states, cfgs[i])
        merged = functools.reduce(merge, [states[i] for states in devices])
        # Each device counts its part of a batch as one.
        assert_equal(merged.lhs.state, wanted[i].lhs.state)


# --- What devices exchange ---------------------------------------------------------

SIZES = strategies.Sizes(width=64, hidden=128, sequences=8, length=16, rows=64)


@pytest.mark.parametrize("strategy", strategies.STRATEGIES, ids=lambda s: s.name)
def test_collectives_of_a_training_step(strategy):
    """As many and as large as the better peer's, and the seed of the noise."""
    measured = {
        one.name: training.train(one, strategy, SIZES)
        for one in contestants.select(training.NAMES)
    }
    counts, sizes = (
        {
            name: sum(getattr(x, what) for x in found)
            for name, (found, _) in measured.items()
        }
        for what in ("times", "bytes")
    )
    peers = contestants.AQTP, contestants.QWIX_STOCHASTIC
    assert counts[contestants.AQTLITE] <= min(counts[name] for name in peers) + 1
    seeds = 2 * 4 * max(SIZES.hidden, SIZES.width)
    assert sizes[contestants.AQTLITE] <= min(sizes[name] for name in peers) + seeds
    _, from_one_device = measured[contestants.AQTLITE]
    assert from_one_device() == 0


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("lowest", [-127, 127], ids=["fits", "does not fit"])
def test_sums_of_a_large_batch(mesh, lowest):
    """Totals that fit int32 are exchanged once, and all are those of one device."""
    rng = np.random.default_rng(0)
    # More products of 127 than int32 holds.
    shapes = (8, 17_000, 3), (8, 17_000, 2)
    lhs, rhs = (rng.integers(lowest, 128, shape, np.int8) for shape in shapes)
    dims = (((0, 1), (0, 1)), ((), ()))
    whole = NamedSharding(mesh, P())
    out_sharding = whole if mesh is EXPLICIT else None
    dot = lowering.Dot(dims, 3, 3, None, out_sharding)

    def contract(lhs, rhs):
        inputs = lowering.DotInput(lhs), lowering.DotInput(rhs)
        return lowering.Integers()(dot, *inputs)

    rows = NamedSharding(mesh, P(("d", "m")))
    with jax.set_mesh(mesh):
        args = jax.device_put((lhs, rhs), rows)
        compiled = jax.jit(contract, out_shardings=whole).lower(*args).compile()
        got = compiled(*args)
    total = np.einsum("bti,btj->ij", lhs, rhs, dtype=np.int64)
    assert (total > np.iinfo(np.int32).max).all() == (lowest == 127)
    np.testing.assert_array_equal(got, total.astype(np.float32))
    sums = [x for x in collectives.of_text(compiled.as_text()) if x.dtype == "int32"]
    assert [list(map(str, one.results)) for one in sums] == [["int32[3,2]"]]


def test_sums_of_a_large_batch_in_a_partial_shard_map():
    """Devices with other values run the same program, without a branch."""
    rng = np.random.default_rng(0)
    shapes = (2, 8, 17_000, 3), (2, 8, 17_000, 2)
    lhs, rhs = (rng.integers(-127, 128, shape, np.int8) for shape in shapes)
    lhs[1], rhs[1] = 127, 127  # A total that does not fit.
    dims = (((0, 1), (0, 1)), ((), ()))

    def contract(lhs, rhs):
        inputs = lowering.DotInput(lhs[0]), lowering.DotInput(rhs[0])
        return lowering.Integers()(lowering.Dot(dims, 3, 3), *inputs)[None]

    specs = dict(in_specs=P("d"), out_specs=P("d"), axis_names={"d"})
    mapped = jax.jit(shard_map(contract, mesh=AUTO, **specs))
    args = jax.device_put((lhs, rhs), NamedSharding(AUTO, P("d", "m")))
    compiled = mapped.lower(*args).compile()
    assert "conditional" not in compiled.as_text()
    total = np.einsum("dbti,dbtj->dij", lhs, rhs, dtype=np.int64)
    np.testing.assert_array_equal(compiled(*args), total.astype(np.float32))


def test_collectives_of_serving():
    """None that float serving lacks but the largest magnitude of each row."""
    (plain, _), (frozen, off) = (
        serving.serve(*how, SIZES) for how in serving.served().values()
    )
    rows = serving.SERVING_ROWS
    large = [one for one in frozen if one.bytes > 4 * rows]
    assert [(x.op, x.bytes) for x in large] == [(x.op, x.bytes) for x in plain]
    assert len(frozen) <= len(plain) + 1
    assert off == 0


@pytest.mark.parametrize("how", ["in_shardings", "committed", "set_mesh", "constraint"])
def test_however_shardings_are_given(how):
    """Tracing does not see all of these; the form is chosen without."""

    def cut(x):
        return lax.with_sharding_constraint(x, NamedSharding(AUTO, P(("d", "m"))))

    def gradient(x, w):
        x = cut(x) if how == "constraint" else x
        return jax.grad(functools.partial(loss, DOTS["int8"]), 1)(x, w)

    rows, whole = NamedSharding(AUTO, P(("d", "m"))), NamedSharding(AUTO, P())
    is_asked = how == "in_shardings"
    jitted = jax.jit(gradient, in_shardings=(rows, whole)) if is_asked else gradient
    x = jax.device_put(X, rows) if how in ("committed", "set_mesh") else X
    with jax.set_mesh(AUTO) if how == "set_mesh" else contextlib.nullcontext():
        compiled = jax.jit(jitted).lower(x, W).compile()
    found = collectives.of_text(compiled.as_text())
    assert {one.op for one in found} == {"all-reduce"}


@pytest.mark.parametrize("axis", [None, "m"], ids=["replicated", "tensor-parallel"])
def test_refreshed_weights_travel_as_integers(axis):
    """From FSDP to a sampler, by `convert` inside `jax.jit`."""
    model = quantize_model(
        nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(32)]), config.fully_quantized()
    )
    variables = jax.jit(model.init)(jax.random.key(0), X)
    wanted = jax.device_get(jax.jit(lambda v: convert(model, v, X))(variables))
    sharded = jax.device_put(variables, NamedSharding(AUTO, P("d")))
    shardings = jax.tree.map(
        lambda x: NamedSharding(AUTO, P(axis) if x.ndim == 2 else P()), wanted
    )
    refresh = jax.jit(lambda v: convert(model, v, X), out_shardings=shardings)
    compiled = refresh.lower(sharded).compile()
    assert_equal(jax.device_get(compiled(sharded)), wanted)
    found = collectives.of_text(compiled.as_text())
    gathered = {x.dtype for x in found if max(one.size for one in x.results) > 64}
    assert gathered == {"int8"}, found


# --- Experts -----------------------------------------------------------------------


def test_rows_and_experts_on_several_devices():
    """A `ragged_dot` and its gradients: partitioned by XLA, and by experts inside."""
    dot = aqtlite.make_ragged_dot(nearest())
    x, w, g = normal((16, 8)), normal((4, 8, 6), 1), normal((16, 6), 2)
    sizes = jnp.array([5, 3, 0, 6])

    def both(x, w, sizes, g):
        out, vjp = jax.vjp(lambda x, w: dot(x, w, sizes), x, w)
        return out, *vjp(g)

    whole = jax.jit(both)
    rows, experts = (NamedSharding(AUTO, P(name)) for name in ("d", "m"))
    shardings = rows, experts, NamedSharding(AUTO, P()), rows
    got = jax.jit(both, in_shardings=shardings)(x, w, sizes, g)
    assert_equal(got, whole(x, w, sizes, g))

    inside = shard_map(both, mesh=AUTO, in_specs=P("d"), out_specs=P("d"))
    halves = of_halves(whole, x, w, sizes, g)
    wanted = jax.tree.map(lambda *one: jnp.concatenate(one), *halves)
    assert_equal(jax.jit(inside)(x, w, sizes, g), wanted)

    explicit = jax.device_put(x, NamedSharding(EXPLICIT, P("d")))
    with pytest.raises(ValueError, match="axis_types"), jax.set_mesh(EXPLICIT):
        dot(explicit, w, sizes)


@pytest.mark.parametrize("groups", [1, 2])
def test_blocks_of_convolutions_on_several_devices(groups):
    """Examples are sharded, and cut into blocks for the gradient of the kernel."""
    int8 = numerics.IntSymmetric(bits=8)
    features, examples = (
        config.Tensor(numerics=int8, blocks=config.Blocks(size=size)) for size in (2, 1)
    )
    of_features = config.DotGeneralRaw(lhs=features, rhs=features)
    of_examples = config.DotGeneralRaw(lhs=examples, rhs=examples)
    conv = aqtlite.make_conv_general_dilated(
        config.DotGeneral(fwd=of_features, dlhs=of_features, drhs=of_examples)
    )
    args = normal((4, 8, 5)), normal((8, 8 // groups, 3), 1), normal((4, 8, 5), 2)

    def both(x, w, g):
        out, vjp = jax.vjp(
            lambda x, w: conv(x, w, (1,), "SAME", feature_group_count=groups), x, w
        )
        return out, *vjp(g)

    wanted = jax.device_get(jax.jit(both)(*args))
    for mesh in (AUTO, EXPLICIT):
        sharded = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(args, (P("d"), P(), P("d")), strict=True)
        ]
        with jax.set_mesh(mesh):
            compiled = jax.jit(both).lower(*sharded).compile()
            got = jax.device_get(compiled(*sharded))
        for one, other in zip(got, wanted, strict=True):
            # Blocks are summed in another order.
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
        if mesh is AUTO:
            kinds = {one.op for one in collectives.of_text(compiled.as_text())}
            assert kinds == {"all-reduce"}, kinds


# --- Functions quantized by rules --------------------------------------------------


def product(w, x):
    return x @ w


@pytest.mark.parametrize("check_vma", [True, False])
def test_rules_inside_a_shard_map(check_vma):
    """Rows on two devices, contracted axes on four, and gradients of both."""

    def over_devices(dot):
        return shard_map(
            lambda x, w: lax.psum(dot(x, w), "m"),
            mesh=AUTO,
            in_specs=(P("d", "m"), P("m")),
            out_specs=P("d"),
            check_vma=check_vma,
        )

    def gradients(function):
        total = lambda x, w: jnp.sum(function(x, w) * G)  # noqa: E731
        return jax.jit(jax.value_and_grad(total, (0, 1)))(X, W)

    by_rules = aqtlite.quantize_function(over_devices(jnp.matmul), nearest(), params=1)
    by_hand = over_devices(lambda x, w: DOTS["int8"](x, w, MATMUL))
    assert len(by_rules.plan(X, W).quantized()) == 1
    assert_equal(gradients(by_rules), gradients(by_hand))


@pytest.mark.parametrize(
    ("mesh", "of_weight"), [(AUTO, P("d")), (EXPLICIT, P()), (MIXED, P())]
)
def test_rules_on_a_mesh(mesh, of_weight):
    """Sharded as the float function is, with what one device gives; served, too."""
    with jax.set_mesh(mesh):
        x, w = jax.device_put(X, P("d")), jax.device_put(W, of_weight)
        by_rules = aqtlite.quantize_function(product, nearest(), params=0)
        out = jax.jit(by_rules)(w, x)
        serve, serving = aqtlite.convert_function(by_rules, w, x)
        served = jax.jit(serve)(serving, x)
        assert out.sharding.is_equivalent_to(jax.jit(product)(w, x).sharding, 2)
    alone = jax.jit(aqtlite.quantize_function(product, nearest(), params=0))(W, X)
    assert_equal((out, served), (alone, alone))


def test_training_by_rules_is_that_of_one_device_and_exchanges_what_injection_does():
    """Rows and columns are shared by devices, in a scan of rematerialized layers."""

    def gradients(dot):
        @jax.checkpoint
        def layer(x, w):
            x = jax.nn.relu(
                dot(jax.nn.relu(dot(x, w["up"], MATMUL)), w["down"], MATMUL)
            )
            return x, None

        return lambda params, x: jnp.sum(lax.scan(layer, x, params)[0])

    def step(total, *shardings):
        given = {"in_shardings": shardings} if shardings else {}
        return jax.jit(jax.value_and_grad(total, (0, 1)), **given)

    by_rules = aqtlite.quantize_function(
        gradients(lax.dot_general), nearest(), params=0, strict=True
    )
    injected = gradients(DOTS["int8"])
    params = {"up": normal((2, 16, 8), 3), "down": normal((2, 8, 16), 4)}
    wanted = step(by_rules)(params, X)
    assert_equal(step(injected)(params, X), wanted)
    columns, rows = P(None, None, "m"), P(None, "m")
    shardings = jax.tree.map(
        lambda spec: NamedSharding(AUTO, spec),
        ({"up": columns, "down": rows}, P("d")),
    )
    compiled = [
        step(total, *shardings).lower(params, X).compile()
        for total in (by_rules, injected)
    ]
    assert_equal(compiled[0](params, X)[1], wanted[1])
    found = [collectives.of_text(one.as_text()) for one in compiled]
    assert found[0]
    assert found[0] == found[1]


def sharded_layers(p, x):
    """Kernels whose columns and whose rows are shared by devices, and a bias."""
    x = jnp.tanh(x @ p["up"].reshape(16, 12) + p["bias"])
    sharding = P("d") if jax.sharding.get_abstract_mesh().axis_names else None
    return jnp.matmul(x, p["up"].reshape(16, 12).T, out_sharding=sharding)


def test_serving_of_weights_over_explicit_axes():
    """Frozen weights are sharded as their parameters, and served as trained."""
    params = {"up": W.reshape(16, 4, 3), "bias": normal((12,))}
    quantized = aqtlite.quantize_function(sharded_layers, nearest(), params=0)
    wanted = jax.jit(quantized)(params, X)
    with jax.set_mesh(EXPLICIT):
        specs = {"up": P(None, "m"), "bias": P("m")}
        sharded = {name: jax.device_put(params[name], specs[name]) for name in params}
        x = jax.device_put(X, P("d"))
        serve, serving = aqtlite.convert_function(quantized, sharded, x)
        served = jax.jit(serve)(serving, x)
    assert aqtlite.is_frozen(serving["params"]["up"])
    qvalues = [
        one[side].qvalue.sharding.spec
        for entries in serving["aqt"].values()
        for one in entries.values()
        for side in one.keys() & {"rhs"}
    ]
    assert qvalues == [P("m", None), P(None, "m")]
    assert_equal(served, wanted)


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    "spec", [P("m", None), P(None, "m")], ids=["inputs", "outputs"]
)
def test_rounding_of_sharded_weights_by_sharded_rows(mesh, spec):
    fn_q = aqtlite.quantize_function(
        lambda w, x: x @ w, config.gptq(4, size=8), params=0
    )
    rows = jnp.concatenate([X, X[:, ::-1] + X])

    def converted(w, x):
        _, state = jax.jit(fn_q)(fn_q.init_state(w, x), w, x)
        return aqtlite.convert_function(fn_q, w, x, state=state)[1]["aqt"]

    wanted = converted(W, rows)
    w = jax.device_put(W, NamedSharding(mesh, spec))
    found = converted(w, jax.device_put(rows, NamedSharding(mesh, P("d", None))))
    assert_equal(found, wanted)


@pytest.mark.parametrize("is_injected", [True, False])
def test_serving_of_linen_models_over_explicit_axes(is_injected):
    dot = {"dot_general": AqtDotGeneral(nearest())} if is_injected else {}
    dense = nn.Dense(12, **dot)
    model = dense if is_injected else quantize_model(dense, nearest())
    params = {"kernel": W, "bias": normal((12,))}
    wanted = jax.jit(model.apply)({"params": params}, X)
    with jax.set_mesh(EXPLICIT):
        x = jax.device_put(X, P("d"))
        kernel = jax.device_put(W, P(None, "m"))
        bias = jax.device_put(params["bias"], P("m"))
        variables = {"params": {"kernel": kernel, "bias": bias}}
        serving = convert(model, variables, x)
        assert serving["aqt"]["kernel"]["rhs"].qvalue.sharding.spec == P("m", None)
        assert_equal(jax.jit(model.apply)(serving, x), wanted)


@pytest.mark.parametrize("is_logical", [False, True])
def test_conversion_in_a_mesh_serves_everywhere(is_logical):
    """Flax constrains parameters to their shardings there, and not frozen ones."""
    partitioned = nn.with_partitioning
    if is_logical:
        partitioned = nn.with_logical_partitioning
    init = partitioned(nn.initializers.lecun_normal(), ("d", None))
    model = quantize_model(nn.Dense(16, kernel_init=init), nearest())
    variables = jax.jit(model.init)(jax.random.key(1), X)
    wanted = jax.jit(model.apply)(variables, X)
    made = [convert(model, variables, X)]
    with jax.set_mesh(AUTO), nn.logical_axis_rules([("d", "d")]):
        made.append(convert(model, variables, X))
        for serving in made:
            assert_equal(jax.jit(model.apply)(serving, X), wanted)
    for serving in made:
        assert_equal(jax.jit(model.apply)(serving, X), wanted)


@pytest.mark.parametrize("scales", [None, config.DoubleScales()])
@pytest.mark.parametrize("spec", [P("d"), P(None, "d")])
def test_scales_of_blocks_are_those_of_one_device(spec, scales):
    tensor = config.Tensor(
        numerics=numerics.NormalFloat(),
        blocks=config.Blocks(size=64),
        double_scales=scales,
    )
    cfg = config.update(config.weight_only(4), {"fwd.rhs": tensor})
    function = aqtlite.quantize_function(lambda w, x: x @ w, cfg, params=0)
    w, x = normal((256, 512)), normal((2, 256), 1)
    sharded = jax.device_put(w, NamedSharding(AUTO, spec))
    found, wanted = (
        aqtlite.convert_function(function, one, x)[1] for one in (sharded, w)
    )
    assert_equal(found, wanted)


@pytest.mark.parametrize(
    "grid", [numerics.NormalFloat(), numerics.DynamicTree()], ids=str
)
def test_tables_of_grids_over_explicit_axes(grid):
    stored = jnp.arange(16).reshape(8, 2).astype(grid.storage_dtype)
    wanted = grid.decode(stored)
    with jax.set_mesh(EXPLICIT):
        got = jax.jit(grid.decode)(jax.device_put(stored, P("m")))
    assert got.sharding.spec == P("m", None)
    assert_equal(got, wanted)


@pytest.mark.parametrize("is_injected", [True, False])
@pytest.mark.parametrize("size", [4, 8])
def test_serving_of_blocks_over_explicit_axes(size, is_injected, tmp_path):
    """Scales are as their names say, on four devices with whole blocks or parts."""
    tensor = config.Tensor(
        numerics=numerics.IntAffine(bits=4),
        calibration=calibration.MinMax(),
        blocks=config.Blocks(size=size),
    )
    cfg = config.update(config.weight_only(4), {"fwd.rhs": tensor})
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("m", "d"))
    dot = {"dot_general": AqtDotGeneral(cfg)} if is_injected else {}
    dense = nn.Dense(12, kernel_init=init, **dot)
    model = dense if is_injected else quantize_model(dense, cfg)
    variables = model.init(jax.random.key(0), X)
    unboxed = nn.unbox(variables)
    wanted = jax.jit(model.apply)(convert(model, unboxed, X), X)
    source = tmp_path / "float.msgpack"
    source.write_bytes(serialization.to_bytes(unboxed))
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)
    loaded = checkpoint.load_serving(tmp_path / "out", model, mesh=EXPLICIT)
    shardings = nn.get_sharding(variables, EXPLICIT)
    with jax.set_mesh(EXPLICIT):
        variables = jax.device_put(variables, shardings)
        x = jax.device_put(X, P())
        serving = convert(model, variables, x)
        inside = jax.jit(lambda variables: convert(model, variables, x))(variables)
        for one in (serving, inside, loaded):
            named = nn.get_sharding(one["aqt"], EXPLICIT)
            found = jax.tree.map(lambda x: x.sharding, one["aqt"])
            assert jax.tree.leaves(found) == jax.tree.leaves(named)
            got = jax.jit(model.apply)(one, x)
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    scale = serving["aqt"]["kernel"]["rhs"].scale
    assert scale.names == ("d", "m" if size < 8 else None)


@pytest.mark.parametrize("preset", [nearest(), config.weight_only(4)])
def test_weights_over_explicit_axes_are_not_packed(preset):
    """Panels are of several rows, so that shards of rows are none of panels."""
    model = quantize_model(nn.Dense(64, use_bias=False), preset)
    kernel, x = normal((64, 64)), normal((8, 64), 1)
    wanted = jax.jit(model.apply)({"params": {"kernel": kernel}}, x)
    kernel = jax.device_put(kernel, NamedSharding(EXPLICIT, P(None, "m")))
    x = jax.device_put(x, NamedSharding(EXPLICIT, P("d")))
    serving = convert(model, {"params": {"kernel": kernel}}, x, packed="cpu")
    assert_equal(jax.jit(model.apply)(serving, x), wanted)


# --- NNX ---------------------------------------------------------------------------


def test_a_sharded_nnx_model_serves_the_same_bits(tmp_path):
    def make():
        init = nnx.with_partitioning(nnx.initializers.normal(), ("d", "m"))
        layer = nnx.Linear(16, 12, kernel_init=init, rngs=nnx.Rngs(0))
        return aqt_nnx.quantize_model(layer, nearest())

    run = nnx.jit(lambda model: model(X))
    with jax.set_mesh(AUTO):
        model = make()
        wanted = np.asarray(run(model))
        serving = aqt_nnx.convert(model, X)
    state = nnx.state(serving)
    nnx.update(serving, jax.device_put(state, nnx.get_named_sharding(state, AUTO)))
    source = tmp_path / "float.msgpack"
    floats = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    source.write_bytes(serialization.to_bytes(floats))
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)
    loaded = checkpoint.load_serving(tmp_path / "out", model, mesh=AUTO)
    for one in (serving, loaded):
        frozen = one.aqt.frozen[""]["kernel"]
        assert frozen.qvalue.sharding == NamedSharding(AUTO, P("m", "d"))
        assert frozen.scale.sharding == NamedSharding(AUTO, P("m", None))
        assert_equal(np.asarray(run(one)), wanted)


def test_compiled_programs_take_no_int4_on_several_devices():
    cfg, x = config.w4a8(), normal((8, 16))
    function = aqtlite.quantize_function(lambda w, x: x @ w, cfg, params=0)
    w = jax.device_put(normal((16, 8)), NamedSharding(AUTO, P("d")))
    serve, serving = aqtlite.convert_function(function, w, x)
    with pytest.raises(ValueError, match=r"int4\[8,16\] on 8 CPU devices.*widen_int4"):
        aqtlite.compile_serving(serve, serving, x)
    program = aqtlite.compile_serving(serve, widen_int4(serving), x)
    assert_equal(program(x), jax.jit(serve)(serving, x))
    # `x` is not committed to a device, and goes where the weights are.
    exported = program.export(["cpu"])
    assert exported.nr_devices == 8


def test_the_page_on_several_devices(tmp_path):
    page = pathlib.Path(__file__).parent.parent / "docs/how_to/several_devices.md"
    program = tmp_path / "program.py"
    (code,) = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    program.write_text(code)
    names = runpy.run_path(str(program))
    assert names["mesh"].shape == {"data": 8, "model": 1}


def test_invariant_training_shards_over_data():
    def loss(w, x):
        out = jax.nn.log_softmax(STOCHASTIC(x, w, MATMUL))
        return jnp.mean(out * out), out

    step = jax.jit(aqtlite.invariant(jax.value_and_grad(loss, has_aux=True)))
    whole = step(W, X)
    rows = jax.device_put(X, NamedSharding(AUTO, P("d")))
    assert_equal(step(W, rows), whole)
    for spec in (P("m"), P(None, "m")):  # Contracted axis, and that of the softmax.
        assert_equal(step(jax.device_put(W, NamedSharding(AUTO, spec)), rows), whole)
    forward = shard_map(
        lambda x: loss(W, x)[1], mesh=AUTO, in_specs=P("d"), out_specs=P("d")
    )
    assert_equal(jax.jit(aqtlite.invariant(forward))(rows), whole[0][1])


@pytest.mark.parametrize("spec", [P("d"), P("d", "m"), P(None, "m")])
def test_invariant_sums_of_what_is_scattered(spec):
    """Devices would add the gradients of their tokens, and then their sums."""
    tokens = jax.random.randint(jax.random.key(0), (64, 8), 0, 5)
    factors = normal((64, 8, 4))

    def added(table, tokens, factors):
        segments = functools.partial(jax.ops.segment_sum, num_segments=5)
        by_row = jax.vmap(segments)(factors, tokens)
        return jax.grad(lambda x: (x[tokens] * factors).sum())(table), by_row

    added = jax.jit(aqtlite.invariant(added))
    table = normal((5, 4))
    wanted = added(table, tokens, factors)
    np.testing.assert_allclose(wanted[0], wanted[1].sum(0), atol=1e-5)
    of_data = jax.device_put((tokens, factors), NamedSharding(AUTO, spec))
    assert_equal(added(table, *of_data), wanted)


@pytest.mark.parametrize(
    ("rows", "weights"),
    [(P("d", "m"), P("m", None)), (P(None, "m"), P()), (P("d"), P(None, "m"))],
)
def test_invariant_training_over_explicit_axes(rows, weights):
    """Axes that are contracted and added are whole where they are."""

    def loss(sharding, w, x):
        out = jnp.einsum("ab,bc->ac", x, w, out_sharding=sharding)
        return jnp.mean(jax.nn.log_softmax(out) ** 2)

    def gradients(sharding):
        grads = jax.value_and_grad(functools.partial(loss, sharding), (0, 1))
        return jax.jit(aqtlite.invariant(grads))

    wanted = gradients(None)(W, X)
    with jax.set_mesh(EXPLICIT):
        got = gradients(P("d"))(jax.device_put(W, weights), jax.device_put(X, rows))
    assert_equal(jax.device_get(got), jax.device_get(wanted))
    x = jax.device_put(X, NamedSharding(EXPLICIT, rows))
    summed = jax.jit(aqtlite.invariant(lambda x: (x.sum(0), x.var(1), x @ W)))
    assert_equal(jax.device_get(summed(x)), jax.device_get(summed(X)))


@pytest.mark.parametrize("check_vma", [True, False])
def test_invariant_sums_over_devices_have_an_order(check_vma):
    def summed(x):
        axes = ("d", "m")
        parts = lax.psum_scatter(x, axes, scatter_dimension=1, tiled=True)
        return lax.psum(x, axes), lax.pmean(x, "m"), parts

    mapped = shard_map(
        summed,
        mesh=AUTO,
        in_specs=P(("d", "m")),
        out_specs=(P(), P("d"), P(None, ("d", "m"))),
        check_vma=check_vma,
    )
    everywhere, along_m, parts = jax.jit(aqtlite.invariant(mapped))(X)
    total, some = np.asarray(X), np.asarray(X).reshape(2, 4, 16)
    for size in (4, 2, 1):
        total = total[:size] + total[size:]
    for size in (2, 1):
        some = some[:, :size] + some[:, size:]
    assert_equal([everywhere, parts], [total, total])
    assert_equal(along_m, some[:, 0] / 4)
    model = aqtlite.quantize_function(
        lambda w, x: mapped(x)[0] @ w, config.fully_quantized(), invariant=True
    )
    assert "depends on the number of devices: psum" in str(model.plan(W, X))


@pytest.mark.parametrize("kernel", [P("d"), P("m"), P(None, "m")], ids=str)
@pytest.mark.parametrize("name", ["smoothquant", "dynamic smoothing", "lsq"])
def test_explicit_axes_of_a_model(name, kernel):
    """Results and gradients are those of one device, parameters replicated or not."""
    smoothing = config.Smoothing(lhs_exponent=0.5, rhs_exponent=0.5)
    cfg = {
        "smoothquant": config.smoothquant(),
        "dynamic smoothing": config.update(config.qat(8), {"fwd.smoothing": smoothing}),
        "lsq": config.lsq(4),
    }[name]
    model = quantize_model(nn.Dense(12), cfg)

    def run(variables, x):
        if "aqt_stats" in variables:
            variables = calibrate(model, variables, [x])
        others = {k: v for k, v in variables.items() if k != "params"}

        def loss(params):
            return (model.apply({**others, "params": params}, x) * G).sum()

        return jax.jit(jax.value_and_grad(loss))(variables["params"])

    variables = model.init(jax.random.key(0), X)
    expected = run(variables, X)
    with jax.set_mesh(EXPLICIT):
        kernel = NamedSharding(EXPLICIT, kernel)
        params = variables["params"]
        params = {**params, "kernel": jax.device_put(params["kernel"], kernel)}
        x = jax.device_put(X, NamedSharding(EXPLICIT, P("d")))
        found = run({**variables, "params": params}, x)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5), found, expected
    )


def test_biases_corrected_on_explicit_axes():
    model = quantize_model(nn.Dense(12), config.weight_only(3))
    variables = nn.Dense(12).init(jax.random.key(0), X)

    def corrected(x):
        return correct_biases(model, variables, convert(model, variables, x), [x])

    expected = corrected(X)
    with jax.set_mesh(EXPLICIT):
        found = corrected(jax.device_put(X, NamedSharding(EXPLICIT, P("d"))))
    np.testing.assert_allclose(
        found["params"]["bias"], expected["params"]["bias"], atol=1e-6
    )


def test_a_report_names_a_gather_of_floats():
    def layer(w, x):
        with jax.named_scope("layer"):
            whole = jax.lax.with_sharding_constraint(w, NamedSharding(AUTO, P()))
            return DOTS["int8"](x, whole, MATMUL)

    w = jax.device_put(W, NamedSharding(AUTO, P(None, "m")))
    gathers = [
        one
        for one in aqtlite.report(layer, w, X).collectives
        if one.op == "all-gather" and one.path == "layer"
    ]
    assert [(one.dtype, one.bytes) for one in gathers] == [("float32", W.nbytes)]
