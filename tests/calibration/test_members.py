"""What holds for every calibration by the values of an array."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import calibration, config
from tests.calibration import members
from tests.common import assert_same, normal, quick_jit

pytestmark = pytest.mark.code("quick")

each = pytest.mark.parametrize("tensor", members.TENSORS.values(), ids=members.TENSORS)
each_that_looks = pytest.mark.parametrize(
    "tensor",
    [t for name, t in members.TENSORS.items() if name not in members.LOOKS_AT_NOTHING],
    ids=[name for name in members.TENSORS if name not in members.LOOKS_AT_NOTHING],
)

quantize = jax.jit(aqtlite.quantize, static_argnums=(1, 2))
# Where no last bit is looked at.
quick_quantize = quick_jit(aqtlite.quantize, static_argnums=(1, 2))


@each
def test_json(tensor):
    assert config.from_json(config.to_json(tensor)) == tensor
    assert len({tensor, config.from_json(config.to_json(tensor))}) == 1


@pytest.mark.code("users")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "po2"),
    [*((name, False) for name in members.TENSORS), ("rms", True), ("min_max", True)],
)
def test_every_program_gives_the_same(name, po2):
    """Sizes that no vector of a processor divides, and a long axis."""
    tensor = dataclasses.replace(members.TENSORS[name], po2_scale=po2)
    x = normal((3, 5, 517)) * 2.0 ** normal((3, 5, 1), 1)
    wide = x * 3

    def quantize(x):
        return aqtlite.quantize(x, tensor, -1)

    def within_a_step(wide):
        def loss(wide):
            q = quantize(wide / 3)
            return jnp.sum(q.dequant() * jnp.tanh(wide)), q

        return jax.grad(loss, has_aux=True)(wide)[1]

    x = jax.jit(lambda wide: wide / 3)(wide)
    wanted = quantize(x)
    assert_same(jax.jit(quantize)(x), wanted)
    assert_same(jax.jit(within_a_step)(wide), wanted)
    by_rows = jax.jit(lambda x: (jax.vmap(quantize)(x), jax.lax.map(quantize, x)))
    for of_rows in by_rows(x):
        assert_same((of_rows.qvalue, of_rows.scale), (wanted.qvalue, wanted.scale))
    with jax.disable_jit():
        assert_same(quantize(x), wanted)


@each_that_looks
def test_order_of_elements_does_not_matter(tensor):
    x = normal((4, 1031))
    order = np.random.default_rng(0).permutation(1031)
    got, wanted = (quantize(x, tensor, 1) for x in (x[:, order], x))
    np.testing.assert_array_equal(got.scale, wanted.scale)
    np.testing.assert_array_equal(got.qvalue, wanted.qvalue[:, order])


@each_that_looks
@pytest.mark.parametrize("size", [3, 100, 512])
def test_what_is_not_finite_makes_its_channel_nan(tensor, size):
    x = np.ones((4, size), np.float32)
    x[2, 0] = -1
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        x[1, 2] = bad
        q = quick_quantize(x, tensor, 1)
        assert np.isnan(q.scale).ravel().tolist() == [False, True, False, False]
        assert np.isnan(q.dequant()).all(1).tolist() == [False, True, False, False]


@each
def test_zeros_stay_zeros(tensor):
    q = quick_quantize(jnp.zeros((2, 3)), tensor, 1)
    assert q.dequant().tolist() == [[0.0] * 3] * 2
    assert np.isfinite(q.scale).all()


@each_that_looks
def test_scale_of_zeros_is_one(tensor):
    x = jnp.array([[0.0, -0.0, 0.0], [0.0, 2.0, -1.0]])
    scale = quick_quantize(x, tensor, 1).scale
    assert scale[0] == 1 and 0 < scale[1] < 1


@each
def test_empty_axis(tensor):
    q = quick_quantize(jnp.zeros((2, 0)), tensor, 1)
    assert q.shape == (2, 0) and np.isfinite(q.scale).all()


@each_that_looks
@pytest.mark.parametrize("value", [3.0, -3.0, 1e-30, 3e38])
def test_one_element(tensor, value):
    q = quick_quantize(jnp.array([[value]]), tensor, 1)
    fraction = min(getattr(tensor.calibration, "clipping_scale", None) or 1, 1)
    np.testing.assert_allclose(q.dequant(), [[fraction * value]], rtol=1e-2)


@each_that_looks
def test_scales_move_with_the_values(tensor):
    """Exactly by powers of two, by which nothing is rounded."""
    x = normal((3, 40))
    one, other = (quantize(x, tensor, 1) for x in (x, x * 2.0**70))
    np.testing.assert_array_equal(one.qvalue, other.qvalue)
    np.testing.assert_array_equal(one.scale * 2.0**70, other.scale)


@each
@pytest.mark.parametrize("axes", [(2, 0), (0, 1, 2)])
def test_axes(tensor, axes):
    """Several shared axes are as one axis of all their elements."""
    x = normal((3, 4, 5))
    kept = [axis for axis in range(3) if axis not in axes]
    flat = x.transpose([*kept, *axes]).reshape(*(x.shape[i] for i in kept), -1)
    got, wanted = (
        quantize(x, tensor, axes),
        quantize(flat, tensor, flat.ndim - 1),
    )
    assert all(got.scale.shape[axis] == 1 for axis in axes)
    np.testing.assert_array_equal(got.scale.ravel(), wanted.scale.ravel())


@each
def test_gradient_through_the_scale_is_finite(tensor):
    """Where `scale_stop_grad` lets it pass, zero channels included."""
    tensor = dataclasses.replace(tensor, scale_stop_grad=False)
    x = normal((3, 40)).at[1].set(0)

    @quick_jit
    @jax.grad
    def gradient_of(x):
        return jnp.sum(aqtlite.quantize(x, tensor, 1).scale)

    gradient = gradient_of(x)
    assert np.isfinite(gradient).all()
    looks = "Constant" not in type(tensor.calibration).__name__
    assert np.any(np.asarray(gradient) != 0) == looks


@each
@pytest.mark.parametrize("spec", [("x", None), (None, "x"), None])
def test_explicit_sharding(tensor, spec):
    """Also of an array that is on no mesh (None)."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = normal((4, 40))
    with jax.set_mesh(mesh):
        if spec is not None:
            sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
            x = jax.device_put(x, sharding)
        got = quick_quantize(x, tensor, 1)
    wanted = quick_quantize(normal((4, 40)), tensor, 1)
    np.testing.assert_array_equal(got.scale, wanted.scale)
    np.testing.assert_array_equal(got.qvalue, wanted.qvalue)


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (cls, field.name)
        for cls in map(calibration.__dict__.get, calibration.__all__)
        if dataclasses.is_dataclass(cls)
        for field in dataclasses.fields(cls)
        if "float" in str(field.type) and "tuple" not in str(field.type)
    ],
)
@pytest.mark.parametrize("value", [1e-46, 1e-320, 1e39, float("nan"), float("inf")])
def test_numbers_that_float32_does_not_have_are_refused(cls, name, value):
    required = [
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING
    ]
    with pytest.raises(ValueError, match=rf"{cls.__name__}\.{name} must be"):
        cls(**{**dict.fromkeys(required, 1.0), name: value})


@pytest.mark.parametrize("cls", [calibration.MseSearch, calibration.SnrSearch])
def test_factors_that_float32_does_not_have_are_refused(cls):
    with pytest.raises(ValueError, match=r"\[1\] must be a normal float32"):
        cls((1.0, 1e-46))


def test_decay_that_float32_rounds_to_one_is_refused():
    with pytest.raises(ValueError, match="below 1, in float32"):
        calibration.MovingAverage(decay=1 - 1e-12)
