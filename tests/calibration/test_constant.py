import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite.calibration import Constant, ConstantRange
from tests.calibration import members
from tests.common import MATMUL, normal, tensor
from tests.extensions import affine

pytestmark = pytest.mark.code("quick")


def test_clips_to_the_magnitude():
    cfg = tensor(4, calibration=Constant(7), grid={"preserve_max_val": True})
    q = aqtlite.quantize(jnp.array([1.0, -9.0, jnp.inf, 0.2]), cfg, 0)
    assert q.scale.tolist() == [1.0]
    assert q.qvalue.tolist() == [1, -7, 7, 0]


def test_clips_to_the_range():
    q = aqtlite.quantize(
        jnp.array([-2.0, -1.0, 0.0, 1.0, 300.0]), members.TENSORS["constant_range"], 0
    )
    np.testing.assert_allclose(q.scale, 2 / 255, rtol=1e-6)
    values = q.dequant()
    assert values[0] == values[1] and values[2] == 0
    np.testing.assert_allclose(values, [-0.7, -0.7, 0, 1, 1.3], atol=0.01)


@pytest.mark.code("users")
@pytest.mark.parametrize("name", ["constant", "constant_range"])
def test_nothing_of_the_operand_is_reduced(name):
    cfg = members.TENSORS[name]
    compiled = jax.jit(lambda x: aqtlite.quantize(x, cfg, 1)).lower(normal((32, 64)))
    assert " reduce(" not in compiled.compile().as_text()
    by_values = members.TENSORS["abs_max"]
    compiled = jax.jit(lambda x: aqtlite.quantize(x, by_values, 1)).lower(
        normal((32, 64))
    )
    assert " reduce(" in compiled.compile().as_text()


def test_gradient_of_what_is_clipped_is_zero():
    cfg = tensor(8, calibration=Constant(1.0), grid={"clip_gradient": True})
    x = jnp.array([[0.5, 1.5, -3.0]])
    both = aqtlite.config.DotGeneral(
        fwd=aqtlite.config.DotGeneralRaw(lhs=cfg, rhs=tensor(8))
    )
    dot = aqtlite.make_dot_general(both)
    gradient = jax.grad(lambda x: dot(x, jnp.ones((3, 1)), MATMUL).sum())(x)
    assert gradient.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), 1e-40, 1e39])
def test_refuses_a_magnitude(value):
    with pytest.raises(ValueError, match=r"Constant\.magnitude must be"):
        Constant(value)


@pytest.mark.parametrize("value", [True, "1", None])
def test_refuses_what_is_no_number(value):
    with pytest.raises(TypeError, match=r"Constant\.magnitude must be a number"):
        Constant(value)
    with pytest.raises(TypeError, match=r"ConstantRange\.min must be a number"):
        ConstantRange(min=value, max=1)


@pytest.mark.parametrize("limits", [(1, 2), (-2, -1), (0, 0), (1, -1)])
def test_refuses_a_range(limits):
    with pytest.raises(ValueError, match="must contain zero"):
        ConstantRange(min=limits[0], max=limits[1])


def test_refuses_a_range_that_is_not_finite():
    with pytest.raises(ValueError, match=r"ConstantRange\.max must be finite"):
        ConstantRange(min=0, max=float("inf"))


def test_equal_and_hashable():
    assert Constant(1) == Constant(1.0) and hash(Constant(1)) == hash(Constant(1.0))
    assert ConstantRange(min=-1, max=0) == ConstantRange(min=-1.0, max=0.0)


def test_refuses_the_other_kind_of_grid():
    with pytest.raises(
        ValueError,
        match=r"has a zero point, but its calibration gives .* calibration.MinMax\(\)",
    ):
        cfg = aqtlite.config.Tensor(
            numerics=affine.AffineUint8(), calibration=Constant(1.0)
        )
        aqtlite.quantize(jnp.ones(3), cfg, 0)
    with pytest.raises(
        ValueError,
        match=r"no zero point, but its calibration gives .* numerics.IntAffine",
    ):
        cfg = tensor(8, calibration=ConstantRange(min=-1, max=1))
        aqtlite.quantize(jnp.ones(3), cfg, 0)
