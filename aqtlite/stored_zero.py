"""The stored value of zero, which pads a `QTensor`."""

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.qtensor import QTensor


def stored_zero(q: QTensor) -> np.ndarray:
    """The stored value that stands for zero on a grid without zero points.

    Raises:
        ValueError: if the grid has no zero.
    """
    grid = q.numerics
    if grid is None:
        return np.zeros((), q.qvalue.dtype)
    with jax.ensure_compile_time_eval():
        noise = jnp.zeros((1,), jnp.uint32) if grid.needs_noise else None
        stored = grid.round(jnp.zeros((1,), jnp.float32), noise)
        has_zero = bool((grid.decode(stored) == 0).all())
    if not has_zero:
        raise ValueError(
            f"pad of a QTensor of shape {q.shape} with zeros, which its grid {grid!r} "
            "does not have; pad the result of .dequant() instead"
        )
    return np.asarray(stored)[0]
