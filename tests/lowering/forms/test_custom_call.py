"""Functions that XLA:CPU calls, registered by several threads."""

import subprocess
import sys

import pytest

from aqtlite.lowering.forms import panel_products

PROGRAM = """
import threading
from concurrent import futures

import flax.linen as nn
import jax
import jax.numpy as jnp

from aqtlite import config
from aqtlite.flax import convert, quantize_model

model = quantize_model(nn.Dense(64), config.w4a8())
x = jnp.ones((8, 256))
serving = convert(model, model.init(jax.random.key(1), x), x)
all_are_here = threading.Barrier(4)


def serve(rows):
    all_are_here.wait()
    return jax.block_until_ready(jax.jit(model.apply)(serving, jnp.ones((rows, 256))))


with futures.ThreadPoolExecutor(4) as pool:
    list(pool.map(serve, range(1, 5)))
"""


@pytest.mark.skipif(not panel_products.runs_here(), reason="needs the extra cpu")
def test_threads_compile_programs_with_one_kernel():
    """In a new process, where nothing has been registered."""
    done = subprocess.run(
        (sys.executable, "-c", PROGRAM), check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
