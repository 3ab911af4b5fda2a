"""Serving programs with int4 weights, which give what the jitted function gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import config, numerics
from aqtlite.lowering.forms import pairs, processor
from tests import common

BLOCKS = {"fwd.rhs.blocks": config.Blocks(size=8)}
CONFIGS = {
    "weight_only": config.weight_only(4),
    "weight_only, blocks": config.update(config.weight_only(4), BLOCKS),
    "w4a8": config.w4a8(),
    "w4a8, blocks": config.update(config.w4a8(), BLOCKS),
    "w4a4": config.fully_quantized(fwd_bits=4),
    "nf4": config.update(
        config.weight_only(4), {"fwd.rhs.numerics": numerics.NormalFloat()}
    ),
    "mxfp4": config.update(config.mxfp4(), BLOCKS),
}


@pytest.mark.parametrize(
    ("dtype", "is_unsigned"),
    [
        (jnp.bfloat16, True),
        pytest.param(jnp.float32, False, marks=pytest.mark.slow),
    ],
)
def test_all_formats_in_one_program(dtype, is_unsigned, monkeypatch):
    """A layer of each, of an odd number of columns; bits are those of `jax.jit`."""
    monkeypatch.setattr(processor, "has_unsigned_dots", lambda: is_unsigned)
    monkeypatch.setattr(pairs, "_FEW_WEIGHTS", 1)
    monkeypatch.setattr(pairs, "_FEW_PACKED", 1)
    monkeypatch.setattr(pairs, "_BLOCK", 64)
    weights = {name: common.normal((24, 11)) for name in CONFIGS}
    x = common.normal((3, 24)).astype(dtype)

    def layers(params, x):
        out = {}
        for name, w in params.items():
            with jax.named_scope(name.replace(", ", "_")):
                out[name] = jnp.tanh(x @ w.astype(x.dtype) + 1).sum(1)
        return out

    rules = [
        aqtlite.Rule(path=name.replace(", ", "_"), cfg=cfg)
        for name, cfg in CONFIGS.items()
    ]
    function = aqtlite.quantize_function(layers, rules, params=0)
    serve, serving = aqtlite.convert_function(function, weights, x)
    program = aqtlite.compile_serving(serve, serving, x)
    got, wanted, trained = (
        program(x),
        jax.jit(serve)(serving, x),
        jax.jit(function)(weights, x),
    )
    for name in CONFIGS:
        np.testing.assert_array_equal(got[name], wanted[name], name)
        np.testing.assert_array_equal(got[name], trained[name], name)
    dtypes = [x.dtype for x in jax.tree.leaves(program.compiled.in_avals)]
    assert jnp.int4 not in dtypes
    assert dtypes.count(jnp.uint8) >= 5
