"""Quantizes 10^7 values in several programs and on several devices.

Run by `test_quantizer.py` in a process of its own, with the dtypes as its arguments.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import aqtlite
from aqtlite import config, numerics

SHAPE = (2500, 4000)
NEAREST = config.Tensor(numerics=numerics.IntSymmetric(bits=8))
NOISY = config.Tensor(
    numerics=numerics.IntSymmetric(
        bits=8, preserve_max_val=True, stochastic_rounding=True
    )
)


def check(dtype):
    def quantize(x, cfg=NEAREST):
        return aqtlite.quantize(x, cfg, (1,))

    def trained(wide):
        """Made by a cast, quantized, and used, all in one program."""
        x = wide.astype(dtype)
        q = quantize(x)
        return q, jnp.sum(q.dequant() - x), quantize(x, NOISY)

    rng = np.random.default_rng(0)
    wide = jnp.asarray(rng.standard_normal(SHAPE, np.float32))
    x = wide.astype(dtype)
    wanted, wanted_noisy = quantize(x), quantize(x, NOISY)

    def same(got, wanted):
        return bool(
            jnp.all(got.qvalue == wanted.qvalue) & jnp.all(got.scale == wanted.scale)
        )

    with jax.disable_jit():
        assert same(quantize(x), wanted), "op by op"
    assert same(jax.jit(quantize)(x), wanted), "jit"
    fused, _, fused_noisy = jax.jit(trained)(wide)
    assert same(fused, wanted), "fused"
    assert same(fused_noisy, wanted_noisy), "fused, with noise"
    assert len(jax.devices()) == 2
    mesh = jax.make_mesh((2,), ("x",))
    for spec in (("x", None), (None, "x")):
        sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        sharded, _, sharded_noisy = jax.jit(trained)(jax.device_put(wide, sharding))
        assert len(sharded.qvalue.sharding.device_set) == 2
        # Compared on the host: the two live on different devices.
        for got, other in ((sharded, wanted), (sharded_noisy, wanted_noisy)):
            for one, two in zip(
                jax.tree.leaves(got), jax.tree.leaves(other), strict=True
            ):
                assert np.array_equal(np.asarray(one), np.asarray(two)), spec
    print(f"{dtype}: all equal")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        check(jnp.dtype(name))
