"""Small arrays merged into one.

A call of a compiled program takes a quarter of a microsecond for each array, as long as
a kernel of a small layer, and a frozen layer has one array more than a layer of floats.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization.states.fixed_scale import FixedScale

# Elements of the largest array to merge: up to here, it is read as fast from any place.
_FEW = 2**12


def scales(tree: Any) -> frozenset[int]:
    """Returns the indices of the leaves that are small scales, in float32.

    Only code of this package reads them, and multiplies by them: XLA fuses that with a
    slice, and bits stay what they are. Sums of floats, as users compute them of other
    variables, could be fused into another order.

    Args:
        tree: serving variables, without markers.
    """

    def is_node(x: Any) -> bool:
        return isinstance(x, QTensor | FixedScale)

    found, count = set(), 0
    for node in jax.tree.leaves(tree, is_leaf=is_node):
        for leaf in jax.tree.leaves(node):
            if is_node(node) and leaf is node.scale and _is_small(leaf):
                found.add(count)
            count += 1
    return frozenset(found)


def _is_small(x: jax.Array) -> bool:
    return x.dtype == np.float32 and x.size <= _FEW


@dataclasses.dataclass(frozen=True)
class Merged:
    """How arrays are merged."""

    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the arrays."""

    @classmethod
    def of(cls, arrays: Sequence[jax.Array]) -> "Merged":
        """Returns how to merge arrays of one dtype."""
        return cls(tuple(x.shape for x in arrays))

    def merge(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Merges arrays of these shapes into one."""
        return _concatenated(*arrays)

    def split(self, merged: jax.Array) -> list[jax.Array]:
        """Returns the arrays of a merged one."""
        sizes = [math.prod(shape) for shape in self.shapes]
        ends = np.cumsum(sizes).tolist()
        return [
            lax.slice_in_dim(merged, end - size, end).reshape(shape)
            for size, end, shape in zip(sizes, ends, self.shapes, strict=True)
        ]


@jax.jit
def _concatenated(*arrays: jax.Array) -> jax.Array:
    return jnp.concatenate([x.ravel() for x in arrays])
