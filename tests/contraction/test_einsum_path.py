"""Einsums of three and more operands: each contraction quantized."""

import jax
import jax.numpy as jnp
import pytest

import aqtlite
from aqtlite import calibration, config, einsum_states
from aqtlite.contraction import einsum_path
from tests.common import (
    mostly_slow,
    nearest,
    normal,
    quick_jit,
    relative_error,
    rms_error,
    tensor,
)
from tests.replacing import assert_bits

pytestmark = pytest.mark.code("quick")

EQUATIONS = {
    "nd,dr,rk->nk": ((16, 8), (8, 2), (2, 8)),
    "nd,dr,rk->kn": ((64, 4), (4, 16), (16, 4)),
    "btd,edf,bte->btf": ((2, 3, 8), (4, 8, 5), (2, 3, 4)),
    "...ij,jk,kl->...il": ((2, 1, 3, 8), (8, 4), (4, 5)),
    "ij,jk,kl,lm": ((3, 4), (4, 5), (5, 4), (4, 2)),
    "bij,bjk,bkl->bil": ((1, 3, 8), (2, 8, 4), (2, 4, 3)),
    "iid,dk,k->ik": ((3, 3, 8), (8, 4), (4,)),
    "nd,d,dk->nk": ((4, 8), (8,), (8, 3)),
    "a,b,c->abc": ((2,), (3,), (4,)),
}


def operands(eqn):
    return [normal(shape, seed) for seed, shape in enumerate(EQUATIONS[eqn])]


@pytest.mark.parametrize("eqn", mostly_slow(EQUATIONS, "nd,dr,rk->nk", "nd,d,dk->nk"))
def test_equation(eqn):
    """Float is jnp.einsum; quantized and its gradients are close to it."""
    arrays = operands(eqn)
    shape = jax.eval_shape(lambda *xs: jnp.einsum(eqn, *xs), *arrays).shape
    cotangent = normal(shape, 9)

    @quick_jit
    def run(*arrays):
        def both(einsum):
            out, pull_back = jax.vjp(einsum, *arrays)
            return out, pull_back(cotangent)

        return (
            both(lambda *xs: jnp.einsum(eqn, *xs)),
            both(lambda *xs: aqtlite.einsum(eqn, *xs, cfg=None)),
            both(lambda *xs: aqtlite.einsum(eqn, *xs, cfg=nearest())),
        )

    wanted, exact, got = map(jax.tree.leaves, run(*arrays))
    for one, in_float, quantized in zip(wanted, exact, got, strict=True):
        assert relative_error(in_float, one) < 1e-5
        assert quantized.shape == one.shape and quantized.dtype == one.dtype
        assert rms_error(quantized, one) < 0.05


def test_each_contraction_is_quantized():
    """The first in the equation is lhs, and a result stands where that stood."""
    cfg = config.DotGeneral(fwd=config.DotGeneralRaw(lhs=tensor(8), rhs=tensor(2)))
    x, a, b = operands("nd,dr,rk->nk")
    got = aqtlite.einsum("nd,dr,rk->nk", x, a, b, cfg=cfg)
    inner = aqtlite.einsum("nd,dr->nr", x, a, cfg=cfg)
    assert_bits(got, aqtlite.einsum("nr,rk->nk", inner, b, cfg=cfg))

    x, a, b = operands("nd,dr,rk->kn")
    got = aqtlite.einsum("nd,dr,rk->kn", x, a, b, cfg=cfg)
    weight = aqtlite.einsum("dr,rk->dk", a, b, cfg=cfg)
    assert_bits(got, aqtlite.einsum("nd,dk->kn", x, weight, cfg=cfg))


def test_products_that_sum_nothing_stay_in_float():
    x, scale, w = operands("nd,d,dk->nk")
    (first, second) = einsum_path.steps_of("nd,d,dk->nk", (x, scale, w))
    assert (first.sums, second.sums) == (False, True)
    got = aqtlite.einsum("nd,d,dk->nk", x, scale, w, cfg=nearest())
    product = jnp.einsum(
        first.equation, *((x, scale) if first.lhs == 0 else (scale, w))
    )
    rest = (product, w) if first.lhs == 0 else (x, product)
    assert_bits(got, aqtlite.einsum(second.equation, *rest, cfg=nearest()))


def test_the_result_is_quantized_once_and_noise_differs():
    noisy = config.update(
        config.fully_quantized(),
        {"out": tensor(8), "fwd.lhs": config.fully_quantized().dlhs.lhs},
    )
    arrays = operands("nd,dr,rk->nk")
    one, other = (
        aqtlite.einsum("nd,dr,rk->nk", *arrays, cfg=noisy, key=jax.random.key(seed))
        for seed in (0, 1)
    )
    assert isinstance(one, aqtlite.QTensor) and one.shape == (16, 8)
    assert (one.dequant() != other.dequant()).any()
    assert relative_error(one.dequant(), jnp.einsum("nd,dr,rk->nk", *arrays)) < 0.05


def test_states_of_each_contraction():
    cfg = config.static_int8(calibration.MaxOverBatches())
    eqn, arrays = "nd,dr,rk->nk", operands("nd,dr,rk->nk")
    states = einsum_states.init_states(cfg, eqn, *arrays)
    assert len(states) == 2
    states = einsum_states.update_states(cfg, states, eqn, *arrays)
    got = aqtlite.einsum(eqn, *arrays, cfg=cfg, states=states)
    assert relative_error(got, jnp.einsum(eqn, *arrays)) < 0.05
    with pytest.raises(ValueError, match="is 2 contractions, and states= has .* of 1"):
        aqtlite.einsum(eqn, *arrays, cfg=cfg, states=states[0])


@pytest.mark.parametrize(
    ("eqn", "shapes", "words"),
    [
        ("ab,bc,cd->ad", ((2, 3), (3, 4)), "has 3 operands, and 2 were given"),
        ("ab,bc->ac", ((2, 3), (3, 4), (4, 5)), "has 2 operands, and 3 were given"),
        ("ab,bc,cd->ad", ((2, 3), (3, 4), (5, 5)), r"'c' has size 4 and size 5 .*5\)"),
        ("ab,bc,c->ad", ((2, 3), (3, 4), (4,)), "does not fit"),
        ("ab,bc,cd->ad", ((2, 3), (3, 4), (4,)), "names 2 axes of an operand of shape"),
        ("ab,bc,cd->aad", ((2, 3), (3, 4), (4, 5)), "'a' appeared more than once"),
    ],
)
def test_errors(eqn, shapes, words):
    with pytest.raises(ValueError, match=words):
        aqtlite.einsum(eqn, *map(jnp.ones, shapes), cfg=nearest())


def test_operands_that_are_no_arrays():
    with pytest.raises(TypeError, match="operand 2 must be an array, got NoneType"):
        aqtlite.einsum("ab,bc,cd->ad", X, X, None, cfg=nearest())


X = jnp.ones((2, 2))
