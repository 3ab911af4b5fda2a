"""What every calibration has to offer."""

import abc

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.lowering import exact


class Calibration(abc.ABC):
    """Finds the magnitude that a grid has to reach: array + axes -> bound."""

    @abc.abstractmethod
    def bound(self, x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
        """The magnitude to map onto the grid's bound.

        Args:
            x: float32, any shape.
            axes: the axes that share one bound.

        Returns:
            Non-negative float32 of x's shape, with size 1 along `axes`.
        """


def scale_from_bound(
    bound: jax.Array, grid_bound: float, unit: float = 1.0
) -> jax.Array:
    """The scale of stored values, of which `bound` takes ``grid_bound / unit``.

    It is NaN where the bound is not finite, whatever the integers of that channel are,
    and `unit` where there is nothing to map.

    The quotient is a product with the constant's reciprocal: XLA rewrites a division
    by a scalar that way in some programs and not in others, and the scale must be the
    same in all of them. Where the quotient would be subnormal (which CPUs flush to
    zero), the channel counts as zero.

    Args:
        bound: float32, not negative.
        grid_bound: the bound of the grid.
        unit: what one stored unit stands for on the grid, a power of two.
    """
    scale = exact.opaque(bound) * (np.float32(unit) / np.float32(grid_bound))
    limits = jnp.finfo(jnp.float32)
    finite = jnp.where(scale <= limits.max, scale, jnp.float32(jnp.nan))
    return jnp.where(scale < limits.tiny, jnp.float32(unit), finite)


def ceil_to_power_of_two(scale: jax.Array) -> jax.Array:
    """The smallest power of two at or above each positive float32 value, exactly.

    Above 2^127, the largest that there is, it is 2^127.
    """
    bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
    mantissa = (1 << 23) - 1
    rounded = jnp.minimum((bits + mantissa) & ~mantissa, (127 + 127) << 23)
    power = jax.lax.bitcast_convert_type(rounded, jnp.float32)
    return jnp.where(jnp.isfinite(scale), power, scale)
