"""Contractions of floats of 8 bits: values, and what each platform is given."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import config, lowering
from aqtlite.lowering.forms import narrow, processor
from tests.common import DIMENSION_NUMBERS, MATMUL, normal
from tests.lowering.dots import contract
from tests.lowering.test_dots import exact


@pytest.fixture(params=[False, True], ids=["float32", "bfloat16"])
def _multiplies_bfloat16(request, monkeypatch):
    """Both kinds of processor, whichever this is."""
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: request.param)


@pytest.mark.code("quick")
@pytest.mark.usefixtures("_multiplies_bfloat16")
def test_values():
    """Every layout of a matrix product, and all other dimension numbers."""
    shapes = [(40, 33), (33, 40)], [(20, 33), (33, 20)]
    cases = {
        f"{left}{right}": (shapes[0][left], shapes[1][right], dims)
        for left, right, dims in (
            (i, j, (((1 - i,), (1 - j,)), ((), ()))) for i in (0, 1) for j in (0, 1)
        )
    }
    for lhs_shape, rhs_shape, dims in {**DIMENSION_NUMBERS, **cases}.values():
        lhs = normal(lhs_shape, 1).astype(jnp.float8_e4m3fn)
        rhs = normal(rhs_shape, 2).astype(jnp.float8_e5m2)
        wanted = exact(lhs, rhs, dims)
        reverse = tuple(reversed(range(wanted.ndim)))

        @jax.jit
        def run(lhs, rhs, dims=dims, order=reverse):
            return (
                contract(lowering.Narrow(), lhs, rhs, dims),
                contract(lowering.Narrow(), lhs, rhs, dims, order),
            )

        straight, reversed_order = run(lhs, rhs)
        assert straight.dtype == jnp.float32
        np.testing.assert_allclose(straight, wanted, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(reversed_order, wanted.T, rtol=1e-5, atol=1e-5)


def test_small_multiples_of_a_unit_are_exact():
    """More bits than float32 holds are summed as integers."""
    values = np.random.default_rng(0).integers(-12, 13, (2, 3, 70_000))
    lhs, rhs = (jnp.asarray(x / 2, jnp.float8_e4m3fn) for x in values)
    dims = ((1,), (1,)), ((), ())
    static = dict(units=(0.5, 0.5), largest=(12, 12))
    got = contract(lowering.Narrow(), lhs, rhs, dims, **static)
    np.testing.assert_array_equal(got, exact(lhs, rhs, dims).astype(np.float32))


@pytest.mark.parametrize(
    ("units", "largest", "wanted"),
    [
        ((0.5, 0.125), (12, 60), (0.5, 0.125)),
        ((0.5, None), (12, None), None),
        ((0.5, 0.0625), (12, 448), None),
    ],
)
def test_which_are_contracted_as_integers(units, largest, wanted):
    assert narrow.units_of_integers(units, largest) == wanted


@pytest.mark.code("quick")
@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu"])
def test_accelerators_contract_float8(platform):
    """The form that XLA:GPU rewrites into a cuBLASLt matmul of fp8, in all three."""
    dot = aqtlite.make_dot_general(config.fp8())

    def loss(lhs, rhs):
        return dot(lhs, rhs, MATMUL).sum()

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    lhs, rhs = normal((8, 32)), normal((32, 16), 1)
    module = jax.export.export(step, platforms=(platform,))(lhs, rhs).mlir_module()
    dots = [line for line in module.splitlines() if "stablehlo.dot_general" in line]
    kinds = [re.findall(r"x(f\w+)>", line.partition(" : ")[2]) for line in dots]
    assert sorted(kinds) == [
        ["f8E4M3FN", "f8E4M3FN", "f32"],
        ["f8E5M2", "f8E4M3FN", "f32"],
        ["f8E5M2", "f8E4M3FN", "f32"],
    ]
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in dots)
