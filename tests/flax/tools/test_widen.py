"""Serving variables whose integers of 4 bits are in other forms."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from jax import lax

import aqtlite
from aqtlite import Rule, calibration, config, kv_cache, numerics, shape_operations
from aqtlite.flax import AqtDotGeneral, convert, widen_int4
from aqtlite.quantization.quantize import quantize
from tests.common import assert_same, normal
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")


@pytest.mark.parametrize("place", [lambda x: x, jax.device_get], ids=["jax", "numpy"])
def test_int4_of_either_library(place):
    weight = config.weight_only(bits=4).fwd.rhs
    q = place(quantize(jnp.array([[3.0, -7.0]]), weight, axes=1))
    wide = widen_int4(q)
    assert (q.qvalue.dtype, wide.qvalue.dtype) == (jnp.int4, jnp.int8)
    np.testing.assert_array_equal(wide.qvalue, [[3, -7]])


def test_a_widened_cache_takes_further_positions():
    cfg = AFFINE
    x = normal((2, 1, 4))
    cache = kv_cache.empty((3, 1, 4), x.dtype, cfg)
    wide = widen_int4(cache)
    cache, wide = (kv_cache.append(one, x, x, cfg) for one in (cache, wide))
    assert (cache.key.qvalue.dtype, wide.key.qvalue.dtype) == (jnp.uint4, jnp.uint8)
    assert_same(wide.key.dequant(), cache.key.dequant())


NF4 = config.update(config.weight_only(), {"fwd.rhs.numerics": numerics.NormalFloat()})
AFFINE = config.update(
    config.qat(8),
    {
        "fwd.rhs.numerics": numerics.IntAffine(bits=4),
        "fwd.rhs.calibration": calibration.MinMax(),
    },
)
UINT4 = pytest.mark.parametrize("cfg", [NF4, AFFINE], ids=["nf4", "affine"])


def dtypes(tree):
    return {x.dtype.name for x in jax.tree.leaves(tree)} - {"float32", "int32"}


def with_dtype(tree, old, new):
    """The integers of a dtype under the name of another one."""
    return jax.tree.map(
        lambda x: lax.bitcast_convert_type(x, new) if x.dtype == old else x, tree
    )


def of_uint4(serving):
    """Serving variables as they were converted before."""
    return with_dtype(serving, jnp.int4, jnp.uint4)


@UINT4
def test_uint4_is_saved_by_orbax_and_served(cfg, tmp_path):
    model, x = nn.Dense(8, dot_general=AqtDotGeneral(cfg)), normal((2, 16))
    variables = init(model, x)
    serving = convert(model, variables, x)
    assert dtypes(serving["aqt"]) == {"int4"}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "serving", serving)
    abstract = jax.eval_shape(lambda v: convert(model, v, x), variables)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "serving", abstract)
    assert dtypes(restored["aqt"]) == {"int4"}
    apply = jax.jit(model.apply)
    trained = apply(variables, x)
    for one in (serving, restored, widen_int4(restored), of_uint4(serving)):
        np.testing.assert_array_equal(apply(one, x), trained)


@UINT4
def test_functions_are_served(cfg):
    x, w = normal((2, 8)), normal((8, 4), 1)
    quantized = aqtlite.quantize_function(
        lambda w, x: jnp.tanh(x @ w), [Rule(cfg=cfg)], params=0
    )
    serve, serving = aqtlite.convert_function(quantized, w, x)
    assert dtypes(serving["aqt"]) == {"int4"}
    serve, trained = jax.jit(serve), jax.jit(quantized)(w, x)
    for one in (serving, of_uint4(serving)):
        np.testing.assert_array_equal(serve(one, x), trained)


@UINT4
@pytest.mark.parametrize("last", [lambda q: q, widen_int4], ids=["int4", "int8"])
def test_arrays_of_uint4_under_the_other_name(cfg, last):
    q = quantize(normal((4, 6)), cfg.fwd.rhs, axes=1)
    other = last(with_dtype(q, jnp.uint4, jnp.int4))
    assert other.qvalue.dtype in (jnp.int4, jnp.int8)
    np.testing.assert_array_equal(other.dequant(), q.dequant())
    np.testing.assert_array_equal(other[1:, 2].dequant(), q[1:, 2].dequant())
    for of in (shape_operations.pad(one, ((0, 1), (0, 0))) for one in (q, other)):
        np.testing.assert_array_equal(of.dequant()[:4], q.dequant())
        np.testing.assert_array_equal(of.dequant()[4], 0)
