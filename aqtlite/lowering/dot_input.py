"""The input to the dot of one operand."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class DotInput(NamedTuple):
    """The input to the dot of one operand: stored integers, or floats."""

    values: jax.Array
    zero_point: jax.Array | None = None
    """int32, keepdims; None for none."""

    largest: int | None = None
    """The largest magnitude of an integer less its zero point, None for that of the
    dtype without its minimum. Of a float, in units; None if it has no unit."""

    unit: float | None = None
    """The power of two of which floats are multiples; None if it is not known."""

    sums: jax.Array | None = None
    """int32, keepdims: the sums of integers less their zero point over the contracting
    axes; None if they are not known."""

    def less_zero_point(self) -> "DotInput":
        """Subtracts the zero point, which makes int16 or int32 of the values."""
        if self.zero_point is None:
            return self
        values = self.values.astype(jnp.int32) - self.zero_point
        if self.largest is not None and self.largest <= jnp.iinfo(jnp.int16).max:
            values = values.astype(jnp.int16)
        return DotInput(values, None, self.largest)
