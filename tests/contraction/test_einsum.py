import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import config
from tests.common import (
    nearest,
    normal,
    quick_jit,
    relative_error,
    rms_error,
    tensor,
)

pytestmark = pytest.mark.code("quick")

# Equation and shapes: what attention, experts and convolution-like models write, then
# the corners of the notation.
EQUATIONS = {
    "bk,kn->bn": ((4, 8), (8, 3)),
    "bk,kn->nb": ((4, 8), (8, 3)),
    "bk,nk->bn": ((4, 8), (3, 8)),
    "btd,dhk->bthk": ((2, 3, 8), (8, 2, 4)),
    "bthk,bshk->bhts": ((2, 3, 2, 8), (2, 5, 2, 8)),
    "bhts,bshk->bthk": ((2, 2, 3, 8), (2, 8, 2, 4)),
    "bthk,hkd->btd": ((2, 3, 2, 4), (2, 4, 8)),
    "bthk,khd->btd": ((2, 3, 2, 4), (4, 2, 8)),
    "ecd,edf->ecf": ((2, 4, 8), (2, 8, 3)),
    "dk,btd->btk": ((8, 3), (2, 3, 8)),
    "i,j->ij": ((4,), (5,)),
    "i,i->": ((8,), (8,)),
    "ij,ij->ij": ((3, 4), (3, 4)),
    "ij,ij->ji": ((3, 4), (3, 4)),
    ",->": ((), ()),
    ",i->i": ((), (4,)),
    # Ellipsis.
    "...k,kn->...n": ((2, 3, 8), (8, 4)),
    "k...,kn->n...": ((8, 2, 3), (8, 4)),
    "...ij,...jk->...ik": ((2, 3, 8), (2, 8, 4)),
    "...ij,jk": ((2, 3, 8), (8, 4)),
    "b...k,...kn->b...n": ((2, 3, 8), (3, 8, 4)),
    "...k,...k->...": ((2, 3, 8), (3, 8)),
    # Ellipses broadcast, and letters of size one do.
    "...ij,...jk->...ik ": ((5, 1, 3, 8), (2, 8, 4)),
    "bij,bjk->bik": ((1, 3, 8), (2, 8, 4)),
    "bk,kn->bn ": ((4, 1), (8, 3)),
    "ij,jk->ik ": ((4, 8), (1, 3)),
    # Letters summed away in one operand, repeated letters.
    "abk,kn->bn": ((2, 4, 8), (8, 3)),
    "bk,knm->bn": ((4, 8), (8, 3, 2)),
    "iik,kn->in": ((4, 4, 8), (8, 3)),
    "iik,kn->n": ((4, 4, 8), (8, 3)),
    "bk,kkn->bn": ((4, 8), (8, 8, 3)),
    "bk,knn->bn": ((4, 8), (8, 3, 3)),
    # Implicit output: the letters that appear once, sorted.
    "bk,kn": ((4, 8), (8, 3)),
    "zk,ka": ((4, 8), (8, 3)),
    "ij,ij": ((3, 4), (3, 4)),
    " b k , k n -> b n ": ((4, 8), (8, 3)),
    "Bk,kN->BN": ((4, 8), (8, 3)),
}


@pytest.mark.parametrize("eqn", EQUATIONS)
def test_equation(eqn):
    """Float is jnp.einsum; quantized is close to it; gradients have their shapes."""
    lhs, rhs = (normal(shape, seed) for seed, shape in enumerate(EQUATIONS[eqn]))

    @quick_jit
    def run(lhs, rhs):
        exact, got = (
            aqtlite.einsum(eqn, lhs, rhs, cfg=cfg) for cfg in (None, nearest())
        )
        return jnp.einsum(eqn, lhs, rhs), exact, got

    wanted, exact, got = run(lhs, rhs)
    assert exact.shape == wanted.shape and exact.dtype == wanted.dtype
    assert relative_error(exact, wanted) < 1e-6
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    assert relative_error(got, wanted) < 0.02


@pytest.mark.parametrize(
    "eqn", ["bk,kn->nb", "bthk,bshk->bhts", "iik,kn->in", "abk,kn->bn", "bij,bjk->bik"]
)
def test_gradients(eqn):
    lhs, rhs = (normal(shape, seed) for seed, shape in enumerate(EQUATIONS[eqn]))
    shape = jax.eval_shape(lambda *xs: jnp.einsum(eqn, *xs), lhs, rhs).shape
    cotangent = normal(shape, 2)

    def gradients(einsum):
        of_both = jax.grad(lambda *xs: jnp.sum(einsum(*xs) * cotangent), (0, 1))
        return quick_jit(of_both)(lhs, rhs)

    got = gradients(lambda *xs: aqtlite.einsum(eqn, *xs, cfg=nearest()))
    wanted = gradients(lambda *xs: jnp.einsum(eqn, *xs))
    for one, other in zip(got, wanted, strict=True):
        assert relative_error(one, other) < 0.03


# 8 bits by 2: the wrong way round would be far off.
ASYMMETRIC = config.DotGeneral(fwd=config.DotGeneralRaw(lhs=tensor(8), rhs=tensor(2)))


@pytest.mark.parametrize(
    ("eqn", "transposed"),
    [
        ("bk,kn->bn", False),
        ("bk,kn->nb", False),
        ("kn,bk->bn", True),
        ("kn,bk->nb", True),
    ],
)
def test_lhs_config_belongs_to_the_first_operand(eqn, transposed):
    x, w = normal((4, 16)), normal((16, 3), 1)
    first, second = (w, x) if transposed else (x, w)
    one, other = (0, 1) if transposed else (1, 0)  # the axes that are contracted
    got = aqtlite.einsum(eqn, first, second, cfg=ASYMMETRIC)
    wanted = jnp.einsum(
        eqn,
        aqtlite.quantize(first, tensor(8), one).dequant(),
        aqtlite.quantize(second, tensor(2), other).dequant(),
    )
    assert relative_error(got, wanted) < 1e-5
    swapped = jnp.einsum(
        eqn,
        aqtlite.quantize(first, tensor(2), one).dequant(),
        aqtlite.quantize(second, tensor(8), other).dequant(),
    )
    assert rms_error(swapped, wanted) > 0.05


def test_lhs_gradient_config_belongs_to_the_first_operand():
    cfg = config.DotGeneral(dlhs=config.DotGeneralRaw(lhs=tensor(1)))
    x, w = normal((4, 16)), normal((16, 3), 1)
    cotangent = normal((3, 4), 2)

    def gradients(cfg):
        return jax.grad(
            lambda w, x: jnp.sum(
                aqtlite.einsum("kn,bk->nb", w, x, cfg=cfg) * cotangent
            ),
            (0, 1),
        )(w, x)

    (dfirst, dsecond), (exact_first, exact_second) = gradients(cfg), gradients(None)
    assert rms_error(dfirst, exact_first) > 0.1
    assert relative_error(dsecond, exact_second) < 1e-5


@pytest.mark.code("users")
def test_is_the_dot_general_where_it_is_one():
    x, w = normal((4, 8)), normal((8, 3), 1)
    got = aqtlite.einsum("bk,kn->bn", x, w, cfg=nearest())
    dot = aqtlite.make_dot_general(nearest())
    np.testing.assert_array_equal(got, dot(x, w, (((1,), (0,)), ((), ()))))
    np.testing.assert_array_equal(got, jnp.einsum("bk,kn->bn", x, w, _dot_general=dot))


@pytest.mark.parametrize(
    ("dtypes", "preferred", "wanted"),
    [
        (("bfloat16", "bfloat16"), None, "bfloat16"),
        (("bfloat16", "float32"), None, "float32"),
        (("bfloat16", "bfloat16"), "float32", "float32"),
    ],
)
def test_dtypes(dtypes, preferred, wanted):
    x, w = normal((4, 8), 0, dtypes[0]), normal((8, 3), 1, dtypes[1])
    for cfg in (None, nearest()):
        got = aqtlite.einsum(
            "bk,kn->bn", x, w, cfg=cfg, preferred_element_type=preferred
        )
        assert got.dtype == wanted


def test_key_reaches_the_gradient():
    x, w, g = normal((4, 8)), normal((8, 3), 1), normal((4, 3), 2)
    cfg = config.fully_quantized(bwd_bits=4)

    def gradient(seed):
        key = jax.random.key(seed)
        return jax.grad(
            lambda x: jnp.sum(aqtlite.einsum("bk,kn->bn", x, w, cfg=cfg, key=key) * g)
        )(x)

    assert np.all(gradient(0) == gradient(0)) and np.any(gradient(0) != gradient(1))


@pytest.mark.parametrize(
    ("eqn", "shapes", "error", "match"),
    [
        ("bk,kn->bn", ((4, 8), (7, 3)), ValueError, "'k' has size 8 and size 7"),
        ("bk,kn->bn", ((4, 8, 2), (8, 3)), ValueError, "bk,kn->bn"),
        ("bk,kn->bm", ((4, 8), (8, 3)), ValueError, "bk,kn->bm"),
        ("bk,kn->bbn", ((4, 8), (8, 3)), ValueError, "bbn"),
        ("bk->b", ((4, 8), (8, 3)), ValueError, "takes two"),
        ("bk,kn,nm->bm", ((4, 8), (8, 3)), ValueError, "has 3 operands"),
        (7, ((4, 8), (8, 3)), TypeError, "eqn must be a string"),
    ],
)
def test_refuses(eqn, shapes, error, match):
    with pytest.raises(error, match=match):
        aqtlite.einsum(eqn, *(normal(shape) for shape in shapes), cfg=nearest())


def test_refuses_integer_operands():
    x, w = jnp.ones((4, 8), jnp.int32), normal((8, 3))
    with pytest.raises(TypeError, match="fwd.lhs must be float32.*int32"):
        aqtlite.einsum("bk,kn->bn", x, w, cfg=nearest())
    np.testing.assert_allclose(
        aqtlite.einsum("bk,kn->bn", x, w, cfg=None), x @ w, rtol=1e-5
    )
