"""Quantized contractions whose forms sum floats have one with a single order."""

import jax
import numpy as np
import pytest

import aqtlite
from aqtlite import config, numerics
from aqtlite.lowering.forms import panel_products
from tests import common

CFGS = {
    "mxfp8": config.mxfp8(),
    "mxfp4": config.mxfp4(),
    "weights of mxfp4": config.DotGeneral(
        fwd=config.DotGeneralRaw(rhs=config.mxfp4().fwd.rhs)
    ),
    "nvfp4": config.nvfp4(),
    "block_fp8": config.block_fp8(),
    "nf4": config.update(
        config.weight_only(4), {"fwd.rhs.numerics": numerics.NormalFloat()}
    ),
}


@pytest.mark.parametrize("name", CFGS)
def test_rows_do_not_depend_on_their_number(name):
    """On either side of the number up to which a kernel contracts them."""
    cfg = CFGS[name]
    x, w = common.normal((300, 128)), common.normal((128, 40), 1)

    @jax.jit
    @aqtlite.invariant
    def dot(x, w):
        return aqtlite.einsum("bk,kn->bn", x, w, cfg=cfg)

    whole = dot(x, w)
    for rows in (1, 3, 17, 256):
        np.testing.assert_array_equal(dot(x[:rows], w), whole[:rows])


@pytest.mark.parametrize("name", CFGS)
def test_bits_are_those_without_a_kernel(name, monkeypatch):
    cfg = CFGS[name]
    x, w = common.normal((20, 128)), common.normal((128, 40), 1)

    def result():
        dot = aqtlite.invariant(lambda x, w: aqtlite.einsum("bk,kn->bn", x, w, cfg=cfg))
        return jax.jit(dot)(x, w)

    got = result()
    monkeypatch.setattr(panel_products, "runs_here", lambda: False)
    jax.clear_caches()
    np.testing.assert_array_equal(got, result())
    jax.clear_caches()


@pytest.mark.parametrize("name", CFGS)
def test_mapped_contractions_are_those_of_each_step(name):
    cfg = CFGS[name]
    x, w = common.normal((3, 20, 64)), common.normal((3, 64, 32), 1)

    def dot(x, w):
        return aqtlite.einsum("bk,kn->bn", x, w, cfg=cfg)

    got = jax.jit(aqtlite.invariant(jax.vmap(dot)))(x, w)
    each = jax.jit(aqtlite.invariant(dot))
    for i in range(3):
        np.testing.assert_array_equal(got[i], each(x[i], w[i]))


def test_one_in_the_condition_of_a_loop_is_refused():
    x, w = common.normal((4, 64)), common.normal((64, 32), 1)

    def loop(x):
        def goes_on(x):
            return aqtlite.einsum("bk,kn->bn", x, w, cfg=CFGS["mxfp8"])[0, 0] > 1

        return jax.lax.while_loop(goes_on, lambda x: x / 2, x)

    with pytest.raises(ValueError, match="condition of a while loop"):
        aqtlite.invariant(loop)(x)
