"""Small floats in blocks, summed as integers by the kernel of CPUs."""

import dataclasses

import flax.linen as nn
import jax
import jax.export
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

NAME = "aqtlite_panels"
E2M1 = config.mxfp4().fwd.rhs


def weights_by(tensor):
    return config.DotGeneral(fwd=config.DotGeneralRaw(rhs=tensor))


def of_grid(dtype):
    grid = numerics.Float.from_dtype(dtype)
    return config.update(config.mxfp4(), {"fwd.*.numerics": grid})


CFGS = {
    "mxfp4": config.mxfp4(),
    "e2m3": of_grid("float6_e2m3fn"),
    "weights by mxfp4": weights_by(E2M1),
    "weights by e2m3": weights_by(of_grid("float6_e2m3fn").fwd.rhs),
    "blocks of 64": weights_by(config.update(E2M1, {"blocks": config.Blocks(size=64)})),
}
LAYOUTS = {
    "one row": ((1, 128), (128, 40), (((1,), (0,)), ((), ()))),
    "rows": ((70, 128), (128, 40), (((1,), (0,)), ((), ()))),
    "contracting axes last": ((3, 5, 128), (40, 128), (((2,), (1,)), ((), ()))),
    "heads": ((2, 3, 4, 64), (4, 64, 27), (((2, 3), (0, 1)), ((), ()))),
}


def operands(layout, dtype="float32"):
    return support.operands(LAYOUTS[layout], dtype)


KINDS = [
    *((layout, "float32") for layout in LAYOUTS),
    ("rows", "bfloat16"),
    ("contracting axes last", "float16"),
]


@pytest.mark.parametrize(("layout", "dtype"), KINDS)
@pytest.mark.parametrize("name", CFGS)
def test_sums_are_those_of_dequantized_operands(name, layout, dtype, without_kernel):
    x, w, dims = operands(layout, dtype)
    dot = aqtlite.make_dot_general(CFGS[name])

    def lowered():
        return jax.jit(lambda x, w: dot(x, w, dims)).lower(x, w)

    program = lowered()
    # Rows of a training step are transposed for it from 64 on.
    is_called = layout in ("rows", "contracting axes last")
    assert (NAME in program.as_text()) == (is_called and panel_products.runs_here())
    got = np.asarray(program.compile()(x, w), np.float64)
    without_kernel()
    program = lowered()
    assert NAME not in program.as_text()
    wanted = np.asarray(program.compile()(x, w), np.float64)
    # Floats of 16 bits have two digits of 8 bits, and a result of 16 bits is rounded.
    error = 2e-6 if dtype == "float32" else float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(got, wanted, atol=error * np.abs(wanted).max(), rtol=0)


@pytest.mark.parametrize("rows", [1, 9, 130])
@pytest.mark.parametrize("name", CFGS)
def test_served_equals_trained(name, rows):
    """In every program: with codes as they are stored, packed, and exported."""
    dense = nn.Dense(40, dot_general=AqtDotGeneral(CFGS[name]))
    x = common.normal((rows, 128))
    params = init(dense, x)
    serving = convert(dense, params, x)

    def call(variables, x):
        return jnp.tanh(dense.apply(variables, x) + 1)

    served = jax.jit(call).lower(serving, x)
    assert (NAME in served.as_text()) == panel_products.runs_here()
    program = aqtlite.compile_serving(call, serving, x)
    if "e2m3" not in name and panel_products.runs_here():
        has_codes = "xi4>" in served.as_text()
        assert has_codes and NAME in program.compiled.as_text()
        sizes = [a.size for a in jax.tree.leaves(program.compiled.in_avals)]
        assert max(sizes) <= max(48 * 128 // 2, x.size)  # Half a byte for a weight.
    wanted = jax.jit(call)(params, x)
    exported = jax.export.export(jax.jit(call))(serving, x)
    for got in (served.compile()(serving, x), program(x), exported.call(serving, x)):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", ["mxfp4", "weights by mxfp4"])
def test_a_row_does_not_depend_on_the_others(name):
    x, w, dims = operands("rows")
    dot = jax.jit(aqtlite.make_dot_general(CFGS[name]), static_argnums=2)
    together = dot(x, w, dims)
    for start, stop in ((0, 1), (3, 20), (5, 70)):
        np.testing.assert_array_equal(dot(x[start:stop], w, dims), together[start:stop])


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("name", ["mxfp4", "weights by mxfp4"])
def test_what_is_not_finite_stays_in_its_row(name, bad):
    x, w, dims = operands("rows")
    dot = jax.jit(aqtlite.make_dot_general(CFGS[name]), static_argnums=2)
    got = dot(x.at[4, 7].set(bad), w, dims)
    assert not np.isfinite(got[4]).any()
    np.testing.assert_array_equal(
        np.delete(got, 4, 0), np.delete(dot(x, w, dims), 4, 0)
    )


def test_gradients_are_those_without_the_kernel(without_kernel):
    x, w, dims = operands("rows")
    cfg = config.update(
        config.mxfp4(),
        {f"{name}.*.numerics": E2M1.numerics for name in ("dlhs", "drhs")},
    )
    dot = aqtlite.make_dot_general(cfg)

    def gradients():
        loss = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(dot(x, w, dims))), (0, 1)))
        return loss(x, w)

    got = gradients()
    without_kernel()
    for one, wanted in zip(got, gradients(), strict=True):
        error = 2e-6 * np.abs(wanted).max()
        np.testing.assert_allclose(one, wanted, atol=error, rtol=0)


@pytest.mark.parametrize("rows", [3, 64, 100])
@pytest.mark.parametrize("name", ["mxfp4", "weights by mxfp4"])
def test_codes_in_their_own_order_are_contracted(name, rows):
    """Contracting axes come first, as in the transposed weight of a checkpoint."""
    cfg = CFGS[name]
    x, w = common.normal((rows, 128)), common.normal((128, 40), 1)
    q = aqtlite.quantize(w, cfg.fwd.rhs, (0,))
    codes = stored_values.to_save(q.qvalue, q.numerics)
    dot = jax.jit(lambda x, w: aqtlite.einsum("bk,kn->bn", x, w, cfg=cfg))
    got = dot(x, dataclasses.replace(q, qvalue=codes))
    np.testing.assert_array_equal(got, dot(x, w))


NF4 = config.update(config.weight_only(4), {"fwd.rhs.numerics": numerics.NormalFloat()})


@pytest.mark.parametrize("sizes", [("rows, 64", "64, 32"), ("3, 64", "64, columns")])
@pytest.mark.parametrize("cfg", [config.mxfp4(), NF4], ids=["mxfp4", "nf4"])
def test_symbolic_sizes_are_exported(cfg, sizes):
    scope = jax.export.SymbolicScope()
    types = [
        jax.ShapeDtypeStruct(jax.export.symbolic_shape(size, scope=scope), jnp.float32)
        for size in sizes
    ]
    dot = jax.jit(lambda x, w: aqtlite.einsum("tk,kn->tn", x, w, cfg=cfg))
    x, w = common.normal((3, 64)), common.normal((64, 32), 1)
    got, wanted = jax.export.export(dot)(*types).call(x, w), dot(x, w)
    np.testing.assert_allclose(got, wanted, atol=2e-6 * abs(wanted).max(), rtol=0)
