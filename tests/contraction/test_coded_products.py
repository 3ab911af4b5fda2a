"""Floats by codes of a table, contracted by a kernel of CPUs."""

import dataclasses
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import config, numerics
from aqtlite.flax import AqtDotGeneral, convert
from aqtlite.lowering.forms import panel_products
from aqtlite.qtensor import stored_values
from tests import common
from tests.contraction import support
from tests.flax.support import init

NAME = "aqtlite_table"
NF4 = config.update(config.weight_only(4), {"fwd.rhs.numerics": numerics.NormalFloat()})
E2M1 = numerics.Float.from_dtype("float4_e2m1fn")


def in_blocks(**blocks):
    return config.update(NF4, {"fwd.rhs.blocks": config.Blocks(**blocks)})


CFGS = {
    "a scale per channel": NF4,
    "blocks of 64": in_blocks(size=64),
    "blocks of 16": in_blocks(size=16),
    "nvfp4": config.nvfp4(),
    "weights by nvfp4": config.DotGeneral(
        fwd=config.DotGeneralRaw(rhs=config.nvfp4().fwd.rhs)
    ),
    "weights by e2m1": config.update(NF4, {"fwd.rhs.numerics": E2M1}),
    "squares": in_blocks(size=32, remaining_size=8),
    "double scales": config.update(
        in_blocks(size=64), {"fwd.rhs.double_scales": config.DoubleScales()}
    ),
}
LAYOUTS = {
    "one row": ((1, 128), (128, 40), (((1,), (0,)), ((), ()))),
    "odd columns": ((5, 128), (128, 27), (((1,), (0,)), ((), ()))),
    "contracting axes last": ((3, 5, 128), (40, 128), (((2,), (1,)), ((), ()))),
    "heads": ((2, 3, 4, 64), (4, 64, 40), (((2, 3), (0, 1)), ((), ()))),
    "features of heads": ((3, 64), (64, 4, 24), (((1,), (0,)), ((), ()))),
}


def operands(layout, dtype="float32"):
    return support.operands(LAYOUTS[layout], dtype)


KINDS = [
    *((layout, "float32") for layout in LAYOUTS),
    ("one row", "bfloat16"),
    ("odd columns", "float16"),
]


@pytest.mark.parametrize(("layout", "dtype"), KINDS)
@pytest.mark.parametrize("name", [name for name in CFGS if name != "double scales"])
def test_sums_are_those_of_decoded_operands(name, layout, dtype, without_kernel):
    x, w, dims = operands(layout, dtype)
    if w.shape[-1] % 8 and name == "squares":
        w = w[..., :24]
    dot = aqtlite.make_dot_general(CFGS[name])

    def lowered():
        return jax.jit(lambda x, w: dot(x, w, dims)).lower(x, w)

    program = lowered()
    assert (NAME in program.as_text()) == panel_products.runs_here()
    got = np.asarray(program.compile()(x, w), np.float64)
    without_kernel()
    program = lowered()
    assert NAME not in program.as_text()
    wanted = np.asarray(program.compile()(x, w), np.float64)
    # Sums in float32, in another order; a result of 16 bits is rounded.
    error = 1e-6 if dtype == "float32" else float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(got, wanted, atol=error * np.abs(wanted).max(), rtol=0)


@pytest.mark.parametrize("columns", [40, 27])
@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("name", [name for name in CFGS if name != "squares"])
def test_served_equals_trained(name, rows, columns):
    """Codes are computed, given two in a byte, or packed."""
    dense = nn.Dense(columns, dot_general=AqtDotGeneral(CFGS[name]))
    x = common.normal((rows, 128))
    params = init(dense, x)

    def call(variables, x):
        return jnp.tanh(dense.apply(variables, x) + 1)

    serving = convert(dense, params, x)
    served = jax.jit(call).lower(serving, x)
    program = aqtlite.compile_serving(call, serving, x)
    for text in (served.as_text(), program.compiled.as_text()):
        assert (NAME in text) == panel_products.runs_here()
    got = served.compile()(serving, x)
    np.testing.assert_array_equal(got, program(x))
    if name != "double scales":  # Scales are rounded only when they are stored.
        np.testing.assert_array_equal(got, jax.jit(call)(params, x))


def test_a_row_does_not_depend_on_the_others():
    x, w = common.normal((70, 128)), common.normal((128, 40), 1)
    dot = aqtlite.make_dot_general(CFGS["blocks of 64"])
    dims = ((1,), (0,)), ((), ())
    dot = jax.jit(dot, static_argnums=2)
    together = dot(x, w, dims)
    if not panel_products.runs_here():
        pytest.skip("there is no kernel for this processor")
    for start, stop in ((0, 1), (3, 20), (5, 70)):
        some = dot(x[start:stop], w, dims)
        np.testing.assert_array_equal(some, together[start:stop])


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_what_is_not_finite_stays_in_its_row(bad):
    x, w, dims = operands("odd columns")
    dot = jax.jit(aqtlite.make_dot_general(CFGS["blocks of 16"]), static_argnums=2)
    got = dot(x.at[4, 7].set(bad), w, dims)
    assert not np.isfinite(got[4]).any()
    np.testing.assert_array_equal(
        np.delete(got, 4, 0), np.delete(dot(x, w, dims), 4, 0)
    )


def test_gradients_are_those_without_the_kernel(without_kernel):
    """They contract the decoded weights."""
    x, w, dims = operands("heads")
    dot = aqtlite.make_dot_general(CFGS["blocks of 16"])
    g = common.normal((2, 3, 40), 2)

    def gradients():
        loss = jax.jit(jax.grad(lambda x, w: jnp.sum(dot(x, w, dims) * g), (0, 1)))
        return loss(x, w)

    got = gradients()
    without_kernel()
    jax.tree.map(np.testing.assert_array_equal, got, gradients())


@pytest.mark.parametrize("name", ["a scale per channel", "blocks of 16"])
def test_codes_may_be_stored_in_any_order(name):
    x, w, dims = operands("heads")
    tensor = CFGS[name].fwd.rhs
    q = aqtlite.quantize(w, tensor, dims[0][1])
    codes = stored_values.to_save(q.qvalue, tensor.numerics)
    q = dataclasses.replace(q, qvalue=codes)
    dot = jax.jit(aqtlite.make_dot_general(CFGS[name]), static_argnums=2)
    wanted = dot(x, q, dims)
    for order in itertools.permutations(range(q.ndim)):
        got = dot(x, q.stored_in(order), dims)
        # Of some orders, other forms contract the decoded values.
        np.testing.assert_allclose(got, wanted, atol=1e-6 * abs(wanted).max(), rtol=0)


def test_a_given_weight_need_not_have_codes():
    """Its floats are stored as they are, beside rows that the kernel of integers does
    not take."""
    x, w, dims = operands("contracting axes last")
    rows, weights = config.mxfp8().fwd.lhs, config.mxfp4().fwd.rhs
    raw = config.DotGeneralRaw(lhs=rows, rhs=weights)
    dot = jax.jit(
        aqtlite.make_dot_general(config.DotGeneral(fwd=raw)), static_argnums=2
    )
    q = aqtlite.quantize(w, weights, dims[0][1])
    assert q.qvalue.dtype == weights.numerics.storage_dtype
    np.testing.assert_array_equal(dot(x, q, dims), dot(x, w, dims))
