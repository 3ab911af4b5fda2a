"""Serving programs for GPUs with fp8 weights laid out before the call.

They are lowered for a GPU, and run here.
"""

import re

import jax
import jax.numpy as jnp
import pytest

import aqtlite
from aqtlite import config
from aqtlite.lowering.target import Target
from aqtlite.program.compiled import packed
from tests import common

pytestmark = pytest.mark.code("quick")

GPU = Target("cuda", partitions=1)

CONFIGS = {
    "fp8": config.fp8(),
    "bfloat16 sums": config.update(
        config.fp8(), {"*.dg_accumulator_dtype": jnp.bfloat16}
    ),
}


def mlp(params, x):
    up, down = params
    return jnp.tanh(x @ up) @ down


def in_a_scan(params, x):
    return jax.lax.scan(lambda x, w: (x, x @ w), x, params)[1]


def packed_call(function, params, x, cfg):
    """The call packed for a GPU, and the call as it is, of leaves."""
    quantized = aqtlite.quantize_function(function, cfg, params=0)
    serve, serving = aqtlite.convert_function(quantized, params, x)
    leaves, structure = jax.tree.flatten(serving)
    plain = jax.jit(lambda leaves, x: serve(jax.tree.unflatten(structure, leaves), x))
    return packed.pack(plain.trace(leaves, x).jaxpr, leaves, GPU), plain, leaves


def transposed(function, *args):
    """The number of transpositions of fp8 in a program for a GPU."""
    traced = jax.jit(function).trace(*args)
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    return len(re.findall(r"stablehlo.transpose .*f8E", program))


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    "function, shapes, count",
    [(mlp, ((32, 64), (64, 32)), 2), (in_a_scan, (3, 32, 32), 1)],
    ids=["mlp", "scan"],
)
def test_no_call_transposes_weights(cfg, function, shapes, count):
    is_pair = isinstance(shapes[0], tuple)
    params = tuple(map(common.normal, shapes)) if is_pair else common.normal(shapes)
    x = common.normal((4, 32))
    call, plain, leaves = packed_call(function, params, x, cfg)
    assert transposed(plain, leaves, x) >= count

    def run(variables, x):
        (out,) = call.function(variables, [x])
        return out

    assert transposed(run, call.variables, x) == 0
    got, wanted = jax.jit(run)(call.variables, x), plain(leaves, x)
    # Sums in bfloat16 may round a value of the next layer to the other side.
    assert common.relative_error(got, wanted) < 2e-2


def test_a_vector_and_other_weights_stay_as_they_are():
    params = common.normal((32, 64))
    dot = lambda w, x: x @ w  # noqa: E731
    one_row, rows = common.normal((1, 32)), common.normal((4, 32))
    assert packed_call(dot, params, one_row, config.fp8())[0] is None
    assert packed_call(dot, params, rows, config.fully_quantized())[0] is None
    assert packed_call(dot, params, rows, config.weight_only())[0] is None
