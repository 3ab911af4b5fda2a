"""Fixed scales, which replace the statistics of a static range in serving."""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FixedScale:
    """The scale of a static range, as conversion stores it.

    Serving then computes no scale, and cannot gather statistics.
    """

    scale: jax.Array
    """Scale, float32, of the operand's rank, with size 1 along axes that share one."""

    zero_point: jax.Array | None = None
    """Zero point, int32; None on a grid without one."""
