"""`make_dot_general` inside the transformations of JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import config
from tests.common import (
    MATMUL,
    assert_same,
    nearest,
    normal,
    relative_error,
    value_and_gradients,
)

pytestmark = pytest.mark.code("quick")

X, W, G = normal((4, 8)), normal((8, 3), 1), normal((4, 3), 2)
CFG = config.fully_quantized()
DOT = aqtlite.make_dot_general(CFG)
KEY = jax.random.key(0)


def matmul(x, w):
    return DOT(x, w, MATMUL)


def loss(x, w, dot=matmul):
    return jnp.sum(dot(x, w) * G)


@functools.cache
def wanted():
    return jax.grad(loss, (0, 1))(X, W)


@pytest.mark.code("users")
def test_jit_equals_eager():
    run = functools.partial(value_and_gradients, DOT, dims=MATMUL, key=KEY)
    assert_same(jax.jit(run)(X, W, cotangent=G), run(X, W, cotangent=G))


@pytest.mark.code("users")
def test_config_as_a_static_argument():
    @functools.partial(jax.jit, static_argnums=0)
    def run(cfg, x, w):
        return aqtlite.make_dot_general(cfg)(x, w, MATMUL)

    assert_same(run(CFG, X, W), matmul(X, W))
    assert_same(run(config.fully_quantized(), X, W), matmul(X, W))
    assert run._cache_size() == 1


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0), (1, 2)])
def test_vmap(in_axes):
    """Each member of the batch is what it is alone."""
    args = [
        x if axis is None else jnp.stack([x, -2 * x, x[::-1]], axis)
        for x, axis in zip((X, W), in_axes, strict=True)
    ]
    dot = aqtlite.make_dot_general(nearest())

    def run(x, w):
        return value_and_gradients(dot, x, w, MATMUL, G)

    got = jax.jit(jax.vmap(run, in_axes))(*args)
    for i in range(3):
        one = [
            x if axis is None else jnp.take(x, i, axis)
            for x, axis in zip(args, in_axes, strict=True)
        ]
        for member, alone in zip(got, run(*one), strict=True):
            assert relative_error(member[i], alone) < 1e-6


@pytest.mark.code("users")
def test_vmap_over_keys():
    keys = jax.random.split(KEY, 3)

    def run(key):
        return jax.grad(lambda x: jnp.sum(DOT(x, W, MATMUL, key=key) * G))(X)

    assert_same(jax.vmap(run)(keys), jnp.stack([run(key) for key in keys]))


def test_scan_over_layers():
    layers = normal((3, 8, 8), 3)

    def apply(dot, x, layers):
        def layer(x, w):
            return jnp.tanh(dot(x, w, MATMUL)), None

        return jnp.sum(jax.lax.scan(layer, x, layers)[0])

    def unrolled(x, layers):
        for w in layers:
            x = jnp.tanh(DOT(x, w, MATMUL))
        return jnp.sum(x)

    got = jax.jit(jax.grad(functools.partial(apply, DOT), (0, 1)))(X, layers)
    same = jax.jit(jax.grad(unrolled, (0, 1)))(X, layers)
    exact = jax.grad(functools.partial(apply, jax.lax.dot_general), (0, 1))(X, layers)
    for one, two, three in zip(got, same, exact, strict=True):
        assert relative_error(one, two) < 1e-5
        assert relative_error(one, three) < 0.1


POLICIES = {
    "none": None,
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    "everything_saveable": jax.checkpoint_policies.everything_saveable,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "dots_with_no_batch_dims": (
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_remat(policy):
    """Recomputing gives the same integers, and the same noise."""
    remat = jax.checkpoint(matmul, policy=POLICIES[policy])
    gradient = jax.grad(functools.partial(loss, dot=remat), (0, 1))
    assert_same(jax.jit(gradient)(X, W), wanted())


def test_remat_saves_the_inputs_alone():
    remat = jax.checkpoint(matmul, policy=jax.checkpoint_policies.nothing_saveable)
    _, vjp = jax.vjp(remat, X, W)
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(vjp)}
    assert dtypes == {"float32"}


def test_a_policy_that_saves_dots_sees_the_integer_dot():
    policy = jax.checkpoint_policies.dots_saveable
    _, vjp = jax.vjp(
        jax.checkpoint(lambda x, w: jnp.sin(matmul(x, w)), policy=policy), X, W
    )
    saved = {(leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(vjp)}
    assert ("int32", (X.shape[0], W.shape[1])) in saved


@pytest.mark.code("users")
def test_inside_a_custom_vjp():
    @jax.custom_vjp
    def scaled(x, w):
        return 3 * matmul(x, w)

    def forward(x, w):
        out, vjp = jax.vjp(matmul, x, w)
        return 3 * out, vjp

    scaled.defvjp(forward, lambda vjp, g: vjp(g))
    got = jax.jit(jax.grad(functools.partial(loss, dot=scaled), (0, 1)))(X, W)
    assert_same(got, wanted())


def test_around_a_custom_vjp():
    @jax.custom_vjp
    def double_gradient(x):
        return x

    double_gradient.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))
    dx, dw = jax.grad(lambda x, w: loss(double_gradient(x), w), (0, 1))(X, W)
    assert_same((dx, dw), (2 * wanted()[0], wanted()[1]))


def test_gradient_of_an_unused_output_is_zero():
    def unused(x, w):
        return jnp.sum(x) + 0 * jnp.sum(jax.lax.stop_gradient(matmul(x, w)))

    dx, dw = jax.grad(unused, (0, 1))(X, W)
    assert np.all(dx == 1) and not np.any(dw)


def test_linear_in_the_cotangent_of_a_vmapped_vjp():
    """`jax.jacrev`: one forward pass and a batch of cotangents."""
    dot = aqtlite.make_dot_general(config.fully_quantized(bwd_bits=None))
    jacobian = jax.jacrev(lambda x: dot(x, W, MATMUL))(X)
    rhs = aqtlite.quantize(W, CFG.fwd.rhs, 0).dequant()
    exact = jnp.einsum("ab,kn->anbk", jnp.eye(4), rhs)
    assert relative_error(jacobian, exact) < 1e-6


@pytest.mark.parametrize("fwd_bits", [8, 4])
def test_export_for_every_platform(fwd_bits):
    """Forward and backward, traced on a CPU host."""
    dot = aqtlite.make_dot_general(config.fully_quantized(fwd_bits=fwd_bits))

    def step(x, w, key):
        return value_and_gradients(dot, x, w, MATMUL, G, key=key)

    exported = jax.export.export(jax.jit(step), platforms=("cpu", "cuda", "tpu"))
    program = exported(X, W, KEY)
    assert program.platforms == ("cpu", "cuda", "tpu")
    assert_same(tuple(program.call(X, W, KEY)), jax.jit(step)(X, W, KEY))


def test_export_of_a_gradient_with_a_symbolic_batch():
    """The noise's index takes a size that is not known."""
    (batch,) = jax.export.symbolic_shape("batch")
    grad = jax.jit(jax.grad(lambda w, x, key: DOT(x, w, MATMUL, key=key).sum()))
    exported = jax.export.export(grad)(
        W, jax.ShapeDtypeStruct((batch, 8), "float32"), KEY
    )
    assert_same(exported.call(W, X, KEY), grad(W, X, KEY))


def test_export_of_a_gradient_with_two_symbolic_axes():
    """Without a key, the seeds of channels take sizes that are not known."""
    dot = functools.partial(DOT, dimension_numbers=(((2,), (0,)), ((), ())))
    grad = jax.jit(jax.grad(lambda w, x: jnp.sum(jnp.sin(dot(x, w)))))
    shape = jax.export.symbolic_shape("batch, length, 8")
    exported = jax.export.export(grad)(W, jax.ShapeDtypeStruct(shape, "float32"))
    x = normal((2, 5, 8))
    assert_same(exported.call(W, x), grad(W, x))


def on_a_mesh(axis_type):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(axis_type,))
    return mesh, jax.NamedSharding(mesh, jax.sharding.PartitionSpec("x", None))


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
@pytest.mark.parametrize("use_fwd_quant", [True, False])
def test_data_parallel_gradients(axis_type, use_fwd_quant):
    """Also where shardings are part of the types: gradients have the operands'."""
    cfg = config.fully_quantized(use_fwd_quant=use_fwd_quant)
    dot = functools.partial(aqtlite.make_dot_general(cfg), dimension_numbers=MATMUL)
    grad = jax.jit(jax.grad(functools.partial(loss, dot=dot), (0, 1)))
    alone = grad(X, W)
    mesh, sharding = on_a_mesh(jax.sharding.AxisType[axis_type])
    with jax.set_mesh(mesh):
        replicated = jax.NamedSharding(mesh, jax.sharding.PartitionSpec())
        dx, dw = grad(jax.device_put(X, sharding), jax.device_put(W, replicated))
    assert dx.sharding.is_equivalent_to(sharding, 2)
    assert_same((np.asarray(dx), np.asarray(dw)), jax.tree.map(np.asarray, alone))


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("is_placed", [True, False])
@pytest.mark.parametrize("use_fwd_quant", [True, False])
def test_gradients_of_weights_that_are_on_no_mesh(use_fwd_quant, is_placed, jit):
    cfg = config.fully_quantized(use_fwd_quant=use_fwd_quant)
    dot = functools.partial(aqtlite.make_dot_general(cfg), dimension_numbers=MATMUL)
    grad = jax.grad(functools.partial(loss, dot=dot), (0, 1))
    alone = jit(grad)(X, W)
    mesh, sharding = on_a_mesh(jax.sharding.AxisType.Explicit)
    x = jax.device_put(X, sharding) if is_placed else X
    with jax.set_mesh(mesh):
        gradients = jit(grad)(x, W)
    assert_same(jax.tree.map(np.asarray, gradients), jax.tree.map(np.asarray, alone))


@pytest.mark.parametrize("rows", [8, 62, 128])
def test_types_on_a_mesh_of_two(rows):
    """What JAX refuses to do with a sharded axis shows in tracing."""
    explicit = jax.sharding.AxisType.Explicit
    mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(explicit,))
    spec = jax.sharding.PartitionSpec("x", None)
    x = jax.ShapeDtypeStruct(
        (rows, 8), jnp.float32, sharding=jax.NamedSharding(mesh, spec)
    )
    with jax.sharding.use_abstract_mesh(mesh):
        out = jax.eval_shape(lambda x: matmul(x, W), x)
        gradient = jax.eval_shape(jax.grad(lambda x: matmul(x, W).sum()), x)
    assert (out.shape, out.sharding.spec) == ((rows, 3), spec)
    assert (gradient.shape, gradient.sharding.spec) == (x.shape, spec)


def test_out_sharding():
    mesh, sharding = on_a_mesh(jax.sharding.AxisType.Explicit)
    with jax.set_mesh(mesh):
        out = DOT(X, W, MATMUL, out_sharding=sharding)
        assert jax.typeof(out).sharding.spec == sharding.spec
    assert_same(np.asarray(out), np.asarray(matmul(X, W)))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="XLA:CPU's allocations")
def test_a_rematerialized_scan_needs_no_more_memory_than_float():
    def temporary_bytes(dot):
        @jax.checkpoint
        def block(x, weights):
            up, down = weights
            return x + dot(jax.nn.relu(dot(x, up, MATMUL)), down, MATMUL), None

        def loss(weights, x):
            return jnp.square(jax.lax.scan(block, x, weights)[0]).mean()

        weights = normal((4, 256, 1024)), normal((4, 1024, 256))
        lowered = jax.jit(jax.grad(loss)).lower(weights, normal((1024, 256)))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    quantized = aqtlite.make_dot_general(config.fully_quantized())
    assert temporary_bytes(quantized) <= temporary_bytes(jax.lax.dot_general)
