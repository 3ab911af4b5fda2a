"""Digests of a decoder before and after training, which are the same everywhere.

``python -m tests.invariance.golden [DTYPE ...]`` prints those of this processor and
version of JAX; ``XLA_FLAGS=--xla_cpu_max_isa=AVX`` has it compile for older ones.
"golden.npz" has the parameters and tokens, since initial values by `jax.random.normal`
differ between processors; "golden.json" has the digests.
"""

import functools
import hashlib
import json
import pathlib
import sys

import jax
import numpy as np

from aqtlite import invariant
from tests.invariance import decoder

FOLDER = pathlib.Path(__file__).parent
DTYPES = "float32", "bfloat16"
STEPS = 20


def stored():
    """Parameters and tokens."""
    with np.load(FOLDER / "golden.npz") as arrays:
        leaves = [arrays[f"parameter_{i}"] for i in range(len(arrays.files) - 1)]
        params = jax.tree.unflatten(jax.tree.structure(decoder.parameters()), leaves)
        return params, arrays["tokens"]


@functools.partial(jax.jit, static_argnums=0)
def trained(dtype, params, tokens):
    """Log-probabilities of the first tokens, and parameters after training on all."""
    params = jax.tree.map(lambda x: x.astype(dtype), params)

    def step(params, tokens):
        gradients = jax.grad(lambda params: decoder.loss(params, tokens)[0])(params)
        return jax.tree.map(lambda x, g: x - 0.1 * g, params, gradients), None

    def run(params, tokens):
        before, _ = decoder.apply(params, tokens[0])
        return before, jax.lax.scan(step, params, tokens)[0]

    return invariant(run)(params, tokens)


def digest(tree):
    values = [np.asarray(x.astype("float32")) for x in jax.tree.leaves(tree)]
    return hashlib.sha256(b"".join(x.tobytes() for x in values)).hexdigest()[:16]


def digests(dtypes):
    """Digests by dtype and content."""
    params, tokens = stored()
    found = {dtype: trained(dtype, params, tokens) for dtype in dtypes}
    return {
        dtype: {"log-probabilities": digest(before), "parameters": digest(after)}
        for dtype, (before, after) in found.items()
    }


if __name__ == "__main__":
    print(json.dumps(digests(sys.argv[1:] or DTYPES), indent=2))
