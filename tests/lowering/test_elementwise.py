"""Elementwise functions: one equation, traced for scalars, with equal bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from aqtlite.lowering.elementwise import Elementwise, ElementwiseOnTarget

pytestmark = pytest.mark.code("quick")


def mixed(factor, x, scale, bits):
    """Operations with constants, predicates, and another dtype for the result."""
    clipped = lax.clamp(np.float32(-2), lax.mul(x, scale), np.float32(2))
    words = lax.bitcast_convert_type(clipped, jnp.int32)
    moves = lax.lt(lax.convert_element_type(bits, jnp.float32), np.float32(factor))
    chosen = lax.select(lax.is_finite(clipped), clipped, lax.full_like(clipped, 0))
    stepped = lax.select(moves, lax.add(words, np.int32(1)), words)
    rounded = lax.convert_element_type(lax.round(chosen), jnp.int32)
    return lax.bitwise_xor(lax.mul(stepped, np.int32(3)), rounded)


MIXED = Elementwise(mixed, (7.0,))


def operands(shape, *, scale_shape=None):
    x = np.linspace(-3, 3, np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    scale = np.full(shape if scale_shape is None else scale_shape, 1.5, np.float32)
    bits = np.arange(x.size, dtype=np.uint32).reshape(shape)
    return jnp.asarray(x), jnp.asarray(scale), jnp.asarray(bits)


def plain(x, scale, bits):
    """The function of whole arrays."""
    return mixed(7.0, x, jnp.broadcast_to(scale, x.shape), bits)


@pytest.mark.slow
@settings(deadline=None, max_examples=12)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=3))
def test_equals_the_function_of_whole_arrays(axes):
    shape = tuple(size for size, _ in axes)
    scale_shape = tuple(size if own else 1 for size, own in axes)
    args = operands(shape, scale_shape=scale_shape)
    out = jax.jit(MIXED)(*args)
    assert out.dtype == jnp.int32
    np.testing.assert_array_equal(out, plain(*args))


def test_scalars_fit_any_shape():
    x, _, bits = operands((2, 3))
    out = jax.jit(MIXED)(x, jnp.float32(1.5), bits)
    np.testing.assert_array_equal(out, plain(x, jnp.float32(1.5), bits))


def test_eager_and_without_jit():
    args = operands((2, 3))
    np.testing.assert_array_equal(MIXED(*args), plain(*args))
    with jax.disable_jit():
        np.testing.assert_array_equal(MIXED(*args), plain(*args))


def test_is_one_equation_traced_once_for_all_shapes():
    traced = []

    def square(x):
        traced.append(x.shape)
        return lax.mul(x, x)

    function = Elementwise(square)
    jaxpr = jax.make_jaxpr(function)(jnp.ones((2, 3)))
    assert len(jaxpr.eqns) == 1
    assert function.function.__qualname__ in str(jaxpr)
    several = [jnp.ones(shape) for shape in ((3,), (2, 1), (4, 2, 3))]
    jax.jit(lambda xs: [function(x) for x in xs]).lower(several)
    assert traced == [(), ()]  # For the type of the result, and in lowering.


@pytest.mark.parametrize("axes", [(0, 0, 0), (1, 0, 1), (1, None, 1), (0, None, None)])
def test_vmap(axes):
    args = [
        x if axis is None else jnp.stack([x, x + 1], axis)
        for x, axis in zip(operands((3, 4), scale_shape=(3, 1)), axes, strict=True)
    ]
    out = jax.jit(jax.vmap(MIXED, axes))(*args)
    np.testing.assert_array_equal(out, jax.vmap(plain, axes)(*args))
    assert "target_dependent" in str(jax.make_jaxpr(jax.vmap(MIXED, axes))(*args))


def test_vmap_of_scalars():
    x, _, bits = operands((3, 4))
    scales = jnp.array([1.5, 2.0])
    out = jax.vmap(MIXED, (None, 0, None))(x, scales, bits)
    np.testing.assert_array_equal(out[1], plain(x, jnp.float32(2), bits))


def test_derivatives_are_those_of_the_function():
    def f(x, y):
        return lax.mul(lax.mul(x, x), y)

    x, y = jnp.arange(6.0).reshape(2, 3), jnp.array([[2.0], [3.0]])
    found, wanted = (
        jax.grad(lambda x, y, g=g: g(x, y).sum(), (0, 1))(x, y)
        for g in (Elementwise(f), f)
    )
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_symbolic_sizes():
    args = operands((2, 3), scale_shape=(2, 1))
    rows, columns = jax.export.symbolic_shape("r, c")
    types = [
        jax.ShapeDtypeStruct((rows, columns if x.shape[1] > 1 else 1), x.dtype)
        for x in args
    ]
    exported = jax.export.export(jax.jit(MIXED))(*types)
    np.testing.assert_array_equal(exported.call(*args), plain(*args))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh(kind):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(kind,))
    spec = PartitionSpec("d", None)
    args = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x in operands((2, 3), scale_shape=(2, 1))
    ]
    with jax.set_mesh(mesh):
        out = jax.jit(MIXED)(*args)
        mapped = jax.jit(jax.shard_map(MIXED, in_specs=spec, out_specs=spec))(*args)
    np.testing.assert_array_equal(out, plain(*args))
    np.testing.assert_array_equal(mapped, plain(*args))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_of_arrays_that_are_on_no_mesh(kind):
    """Constants inside are on the current one."""
    args = operands((2, 3), scale_shape=(2, 1))
    wanted = plain(*args)
    with jax.set_mesh(jax.make_mesh((1,), ("d",), axis_types=(kind,))):
        np.testing.assert_array_equal(jax.jit(MIXED)(*args), wanted)


def test_the_form_for_the_platform_runs_inside():
    class Times(ElementwiseOnTarget):
        def reference(self, x):
            return lax.mul(x, np.float32(2))

        def lowered(self, target, x):
            is_cpu = target.platform == "cpu"
            return lax.add(self.reference(x), np.float32(100 if is_cpu else 0))

    times = Times()
    x = jnp.ones((2, 2))
    inside = Elementwise(lambda x: lax.add(times(x), np.float32(1)))
    assert jax.jit(times)(x).tolist() == [[102.0] * 2] * 2
    assert jax.jit(inside)(x).tolist() == [[103.0] * 2] * 2
    exported = jax.export.export(jax.jit(inside), platforms=["tpu"])(x)
    assert "1.000000e+02" not in exported.mlir_module()


def test_other_shapes_are_refused():
    x, scale, bits = operands((2, 3))
    with pytest.raises(ValueError):
        jax.jit(MIXED)(x, scale, bits[:, :2])


def test_under_a_policy_of_checkpoint():
    def loss(x):
        y = Elementwise(lambda x: lax.mul(x, lax.sin(x)))(x)
        return jnp.sum(lax.mul(y, y))

    x = jnp.arange(6.0).reshape(2, 3)
    for policy in (None, jax.checkpoint_policies.everything_saveable):
        remat = jax.checkpoint(loss, policy=policy)
        np.testing.assert_allclose(
            jax.jit(jax.grad(remat))(x), jax.grad(loss)(x), rtol=1e-6
        )


def test_equal_functions_are_equal():
    other = Elementwise(mixed, (8.0,))
    assert {MIXED, Elementwise(mixed, (7.0,)), other} == {MIXED, other}
    assert repr(MIXED) == f"Elementwise({mixed.__module__}.mixed, (7.0,))"
    jitted = functools.partial(jax.jit, static_argnums=0)(lambda f, *args: f(*args))
    args = operands((2, 3))
    np.testing.assert_array_equal(jitted(MIXED, *args), plain(*args))
