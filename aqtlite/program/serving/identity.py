"""The identity of a frozen weight, by which serving tells it from others.

It is a digest of how the weight is computed from parameters. Samples of parameters that
stay in float beside a weight tell whether they have changed since.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from aqtlite.shapes.sharding import explicit_spec

Identity = str | tuple[float | None, ...]
"""A digest of a weight's computation; or numbers, of a framework whose calls do not see
how a weight is computed."""

SAMPLED = 64
"""Number of elements that `spread` chooses. Part of the format of frozen weights, as is
`spread`."""


def spread(shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Returns indices of at most `SAMPLED` elements spread over rows and columns.

    Args:
        shape: shape of the array.
    """
    size = math.prod(shape)
    count = min(size, SAMPLED)
    number, step = np.arange(count), max(size // max(count, 1), 1)
    # Equal steps would stay in one column if the row length divides them.
    return np.unravel_index(number * step + number * 31 % step, shape)


def sample(x: jax.Array) -> jax.Array:
    """Returns the elements of an array at the indices of `spread`, as a vector."""
    if not x.ndim:
        return x.reshape(1)
    places = x.at[tuple(spread(x.shape))]
    if explicit_spec(x) is None:
        return places.get(mode="promise_in_bounds")
    whole = jax.typeof(x).sharding.update(spec=PartitionSpec())
    return places.get(mode="promise_in_bounds", out_sharding=whole)


def sample_parameters(parameters: Sequence[Any]) -> jax.Array:
    """Returns the concatenated samples of several parameters, float32."""
    samples = (sample(jnp.asarray(x)).astype(jnp.float32) for x in parameters)
    return jnp.concatenate(list(samples))


def same_parameters(parameters: Sequence[Any], stored: jax.Array) -> jax.Array:
    """Whether parameters still have the values stored by `sample_parameters`.

    Compares in the parameters' current dtypes, which may be narrower than before.
    """
    with jax.debug_nans(False):
        found = sample_parameters(parameters)
        counts = np.cumsum([min(np.size(x), SAMPLED) for x in parameters])
        stored = jnp.concatenate(
            [
                part.astype(x.dtype).astype(jnp.float32)
                for x, part in zip(
                    parameters, jnp.split(stored, counts[:-1]), strict=True
                )
            ]
        )
        return jnp.all((found == stored) | (jnp.isnan(found) & jnp.isnan(stored)))
