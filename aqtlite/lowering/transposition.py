"""Transpositions of integers of 4 bits."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite.lowering.target import TargetDependent


def transposed(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Computes ``x.transpose(axes)`` for any dtype.

    XLA:GPU (jax 0.11.2) loses integers of 4 bits that a kernel writes in another order
    than it reads them: there they are transposed as int8, and narrowed by a kernel of
    its own.
    """
    is_narrow = x.dtype in (jnp.int4, jnp.uint4) and isinstance(x, jax.Array)
    return _Transposed(axes)(x) if is_narrow else x.transpose(axes)


@dataclasses.dataclass(frozen=True)
class _Transposed(TargetDependent):
    """A transposition of integers of 4 bits."""

    axes: tuple[int, ...]

    def reference(self, x):
        return x.transpose(self.axes)

    def lowered(self, target, x):
        if not target.is_gpu:
            return self.reference(x)
        wide = lax.optimization_barrier(x.astype(jnp.int8))
        return lax.optimization_barrier(wide.transpose(self.axes)).astype(x.dtype)
