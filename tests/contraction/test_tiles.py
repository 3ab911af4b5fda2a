"""Contractions in blocks, in training: the kernel's bits are those of XLA's loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import config
from aqtlite.lowering.forms import panel_products
from tests.contraction import support

NAME = "aqtlite_panels"


def in_blocks(cfg, size):
    return config.update(cfg, {"fwd.rhs.blocks": config.Blocks(size=size)})


CFGS = {
    "mxint8": config.mxint8(),
    "int8 by int4": in_blocks(config.w4a8(), 32),
    "float32 by int4": in_blocks(config.weight_only(4), 32),
    "float32 by int8": in_blocks(config.weight_only(8), 32),
}
LAYOUTS = {
    "matrices": ((96, 64), (64, 160), (((1,), (0,)), ((), ()))),
    "heads": ((2, 48, 2, 64), (2, 64, 96), (((2, 3), (0, 1)), ((), ()))),
    "rows behind": ((64, 96), (64, 96), (((0,), (0,)), ((), ()))),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CFGS)
def test_gradients_have_equal_bits_with_and_without_the_kernel(
    name, layout, dtype, monkeypatch
):
    x, w, dims = support.operands(LAYOUTS[layout], dtype)
    dot = aqtlite.make_dot_general(CFGS[name])

    def gradients():
        def loss(x, w):
            return jnp.sum(jnp.tanh(dot(x, w, dims)).astype(jnp.float32))

        lowered = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(x, w)
        return lowered.as_text().count(NAME), lowered.compile()(x, w)

    found, got = gradients()
    # Floats are not transposed.
    has_floats_first = name.startswith("float32") and layout == "rows behind"
    assert (found > 0) == (panel_products.runs_here() and not has_floats_first)
    monkeypatch.setattr(panel_products, "runs_here", lambda: False)
    found, wanted = gradients()
    assert found == 0
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
