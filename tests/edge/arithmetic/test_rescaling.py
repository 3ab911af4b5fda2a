import functools

import jax
import numpy as np
import pytest

from aqtlite.edge.arithmetic import rescaling
from aqtlite.edge.grid import Quantized
from tests.edge.arithmetic import interpreter
from tests.edge.arithmetic.interpreter import Case, grid


def _every(of):
    low, high = of.limits
    return np.arange(low, high + 1).astype(of.dtype)


def _case(x_grid, to, kernels):
    return Case(
        lambda x: x,
        ((_every(x_grid), x_grid),),
        to,
        lambda x: rescaling.rescale(x, to, kernels),
    )


@pytest.mark.parametrize("kernels", ["xnnpack", "builtin", "reference"])
def test_equals_the_interpreter(kernels):
    x, wide = grid(0.0473, 5), grid(0.00019, dtype="int16")
    interpreter.check(
        {
            "finer": _case(x, grid(0.0317, -20), kernels),
            "coarser": _case(x, grid(0.0973, 90), kernels),
            "far_coarser": _case(x, grid(17.3, 90), kernels),
            "far_finer": _case(x, grid(0.0003, 3), kernels),
            "to_int16": _case(x, wide, kernels),
            "from_int16": _case(wide, x, kernels),
            "int16": _case(wide, grid(0.00031, dtype="int16"), kernels),
        },
        kernels,
    )


@functools.partial(jax.jit, static_argnums=(1, 2))
def _rounded(x, of, kernels):
    return Quantized(rescaling.quantize(x, of, kernels), of).dequant()


@pytest.mark.parametrize("kernels", ["xnnpack", "reference"])
def test_floats_equal_the_interpreter(kernels):
    # Close to halves of the finer grid, and some of them halves of the coarser one.
    steps = np.random.default_rng(0).integers(-32768, 32767, 4096)
    x = ((steps + 0.5) * 0.00019).astype(np.float32)
    x[:4] = 0.0, 0.5 * 0.0473, 1e4, -1e4
    narrow, wide = grid(0.0473, 5), grid(0.00019, dtype="int16")
    found = interpreter.run(
        lambda x: {
            "narrow": interpreter.fake_quant(x, narrow) * 1,
            "wide": interpreter.fake_quant(x, wide) * 1,
        },
        x,
        kernels,
    )
    for name, of in (("narrow", narrow), ("wide", wide)):
        floats = _rounded(x, of, kernels)
        np.testing.assert_array_equal(found[name], floats, err_msg=name)
