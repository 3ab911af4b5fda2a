"""Scales that take the place of the statistics that they came from."""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FixedScale:
    """The scale of a static range, as conversion stores it.

    Serving then computes no scale, and cannot gather statistics.
    """

    scale: jax.Array
    """float32, of the rank of the operand, with size 1 along axes that share one."""

    zero_point: jax.Array | None = None
    """int32, None on a grid without one."""
