"""The number of batches that statistics are of.

It is float32, as statistics are, so that the variables of a model can be differentiated
as a whole: JAX refuses integers there. It is exact up to 2^24 batches.

A number that is not whole is none of batches: an optimizer changed it, by weight decay
for instance, or it is a mean, and so are the statistics beside it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def none() -> jax.Array:
    """The number before the first batch."""
    return jnp.zeros((), jnp.float32)


def is_of_batches(count: Any) -> jax.Array:
    """Tells whether statistics are of one batch at least, and of whole ones."""
    return jnp.logical_and(count >= 1, count == jnp.floor(count))


def problem(count: Any) -> str | None:
    """What statistics have, if they are certainly not those of batches.

    In a call that is differentiated their number is known, under `jax.jit` it is not.
    """
    known = lax.stop_gradient(count)
    if isinstance(known, jax.core.Tracer) or np.asarray(is_of_batches(known)).all():
        return None
    if (np.asarray(known) == np.floor(known)).all():
        return "no statistics yet"
    return (
        "statistics that weight decay or a mean changed (hand optimizers 'params' "
        "without 'aqt_stats')"
    )
