"""The identity of a weight, by which serving tells it from others.

It is a fingerprint: the first element, and the last one along each axis. An operand
made of placeholders has numbers and NaN there that no other parameters, and no other
transformation of them, give. One made of parameters that stayed in float has
its own values, and is told from others by elements all over it as well: the rows of an
embedding are not trained at the same time.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from aqtlite.shapes.sharding import explicit_spec

Fingerprint = tuple[float | None, ...]
"""The first element of an operand, and the last one along each axis; None is NaN."""

Identity = Fingerprint | str
"""A fingerprint, or a text that says how the weight is made, which a model has whose
programs are served as they were traced."""


def fingerprint(x: jax.Array) -> list[jax.Array]:
    """Returns the first element of an array, and the last one along each of its axes.

    Each keeps the rank of the array, so that a transformation can stack it along the
    axis along which it stacks the array.
    """
    starts = [(0,) * x.ndim]
    for axis in range(x.ndim):
        starts.append(tuple(x.shape[a] - 1 if a == axis else 0 for a in range(x.ndim)))
    with jax.debug_nans(False):
        if explicit_spec(x) is None:
            return [lax.slice(x, start, [i + 1 for i in start]) for start in starts]
        # JAX refuses to slice axes that are sharded.
        places = [tuple(np.array([i]) for i in start) for start in starts]
        whole = jax.typeof(x).sharding.update(spec=PartitionSpec())
        elements = (x.at[place].get(out_sharding=whole) for place in places)
        return [element.reshape((1,) * x.ndim) for element in elements]


def from_values(values: list[Any]) -> Fingerprint | None:
    """Returns the fingerprint of evaluated values, or None if they give none.

    Args:
        values: of `fingerprint`, each stacked along any axes. One weight has one value
            for each, and not NaN and zero alone.
    """
    found: list[float | None] = []
    for value in values:
        distinct = {None if np.isnan(v) else float(v) for v in np.ravel(value)}
        if len(distinct) != 1:
            return None
        found.extend(distinct)
    return tuple(found) if any(found) else None


def same(first: Identity, second: Identity, dtype: Any) -> bool:
    """Whether two identities of operands of one dtype are of one weight."""
    if isinstance(first, str) or isinstance(second, str):
        return first == second
    return len(first) == len(second) and all(
        bool(_close(np.float32(np.nan if a is None else a), b, dtype))
        for a, b in zip(first, second, strict=True)
    )


def matches(x: jax.Array, identity: Fingerprint) -> jax.Array:
    """Compares the fingerprint of an operand; returns a bool, concrete or traced."""
    with jax.debug_nans(False):
        result = jnp.bool_(True)
        for found, expected in zip(fingerprint(x), identity, strict=True):
            value = found.reshape(()).astype(jnp.float32)
            result = result & _close(value, expected, x.dtype)
    return result


def has_nan(x: jax.Array) -> jax.Array:
    """Whether a value of the fingerprint of an operand is NaN."""
    with jax.debug_nans(False):
        return jnp.isnan(stack(fingerprint(x))).any()


SAMPLED = 64
"""The elements that are read all over an array. It is part of the format of frozen
weights, as `spread` is."""


def spread(shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Returns the indices of elements all over an array, of all rows and columns.

    Args:
        shape: shape of the array.
    """
    size = math.prod(shape)
    count = min(size, SAMPLED)
    number, step = np.arange(count), max(size // max(count, 1), 1)
    # Steps alone would stay in one column where rows divide them.
    return np.unravel_index(number * step + number * 31 % step, shape)


def sample(x: jax.Array) -> jax.Array:
    """Returns the elements of an array at the places of `spread`, as a vector."""
    if not x.ndim:
        return x.reshape(1)
    places = x.at[tuple(spread(x.shape))]
    if explicit_spec(x) is None:
        return places.get(mode="promise_in_bounds")
    whole = jax.typeof(x).sharding.update(spec=PartitionSpec())
    return places.get(mode="promise_in_bounds", out_sharding=whole)


def values_of(x: jax.Array) -> jax.Array:
    """Returns values that tell an operand of floats from others.

    Its fingerprint, and elements all over it; of the rank of the operand.
    """
    elements = sample(x)
    return stack([*fingerprint(x), elements.reshape(-1, *(1,) * (x.ndim - 1))])


def matches_values(x: jax.Array, values: jax.Array) -> jax.Array:
    """Compares an operand of floats with the one that was frozen.

    Args:
        x: the operand.
        values: `values_of` the operand that was frozen; or its fingerprint
            alone, as it was converted before there were others.
    """
    with jax.debug_nans(False):
        found = values_of(x)[: values.shape[0]].astype(jnp.float32)
        values = values.astype(jnp.float32)
        # What cancels may be another small number in another program.
        largest = jnp.max(jnp.where(jnp.isfinite(values), jnp.abs(values), 0))
        close = jnp.abs(found - values) <= tolerance(x.dtype) * largest
        same = (found == values) | (jnp.isnan(found) & jnp.isnan(values))
        return jnp.all(close | same)


def sample_parameters(parameters: Sequence[Any]) -> jax.Array:
    """Returns the samples of several parameters, joined: float32."""
    samples = (sample(jnp.asarray(x)).astype(jnp.float32) for x in parameters)
    return jnp.concatenate(list(samples))


def same_parameters(parameters: Sequence[Any], stored: jax.Array) -> jax.Array:
    """Whether parameters have the values of `sample_parameters`.

    They are compared in the precision that they have now, which may be a lower one.
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


def stack(values: list[jax.Array]) -> jax.Array:
    """Joins the values of a fingerprint to one array of the rank of the operand."""
    return jnp.concatenate(values, axis=0)


def tolerance(dtype: Any) -> float:
    """Returns the relative difference that programs may make of a number."""
    return 2.0**-8 if jnp.dtype(dtype).itemsize < 4 else 2.0**-16


def _close(value: Any, expected: float | None, dtype: Any) -> Any:
    if not expected:
        # NaN times zero: XLA may make a selection of a multiplication by a mask.
        return (value != value) | (value == 0)
    return abs(value - expected) <= tolerance(dtype) * abs(expected)
