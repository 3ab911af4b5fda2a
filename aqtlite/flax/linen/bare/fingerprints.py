"""Fingerprints of operands, by which a bare call tells frozen weights apart.

A fingerprint is the first element, and the last one along each axis. In an operand made
of placeholders these are numbers and NaN that no other parameter or transformation
gives. An operand made of parameters that stayed in float has values of its own, and
elements spread over the whole array are compared as well: training may change only some
rows of an embedding.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from aqtlite.program.serving import identity
from aqtlite.shapes.sharding import explicit_spec

Fingerprint = tuple[float | None, ...]
"""The first element of an operand, and the last one along each axis; None is NaN."""


def fingerprint(x: jax.Array) -> list[jax.Array]:
    """Returns the first element of an array, and the last one along each axis.

    Each keeps the rank of the array, so that a transformation can stack it along the
    same axis as the array.
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
    """Returns the fingerprint of evaluated values, or None.

    None if an element differs along a stacked axis, or if all are NaN or zero.

    Args:
        values: result of `fingerprint`, each element stacked along any axes.
    """
    found: list[float | None] = []
    for value in values:
        distinct = {None if np.isnan(v) else float(v) for v in np.ravel(value)}
        if len(distinct) != 1:
            return None
        found.extend(distinct)
    return tuple(found) if any(found) else None


def are_same(first: Fingerprint, second: Fingerprint, dtype: Any) -> bool:
    """Whether two fingerprints, of operands of one dtype, belong to one weight."""
    return len(first) == len(second) and all(
        bool(_close(np.float32(np.nan if a is None else a), b, dtype))
        for a, b in zip(first, second, strict=True)
    )


def matches(x: jax.Array, expected: Fingerprint) -> jax.Array:
    """Whether an operand has a fingerprint: a bool, concrete or traced."""
    with jax.debug_nans(False):
        result = jnp.bool_(True)
        for found, number in zip(fingerprint(x), expected, strict=True):
            value = found.reshape(()).astype(jnp.float32)
            result = result & _close(value, number, x.dtype)
    return result


def has_nan(x: jax.Array) -> jax.Array:
    """Whether the fingerprint of an operand contains NaN."""
    with jax.debug_nans(False):
        return jnp.isnan(stack(fingerprint(x))).any()


def values_of(x: jax.Array) -> jax.Array:
    """Returns values that identify a float operand.

    Its fingerprint and its `identity.sample`, joined along the first axis; of the rank
    of `x`.
    """
    elements = identity.sample(x)
    return stack([*fingerprint(x), elements.reshape(-1, *(1,) * (x.ndim - 1))])


def matches_values(x: jax.Array, values: jax.Array) -> jax.Array:
    """Whether a float operand is the one that was frozen.

    Args:
        x: the operand.
        values: `values_of` the frozen operand; or its fingerprint alone, as older
            conversions stored.
    """
    with jax.debug_nans(False):
        found = values_of(x)[: values.shape[0]].astype(jnp.float32)
        values = values.astype(jnp.float32)
        # A value that cancels may be another small number in another program.
        largest = jnp.max(jnp.where(jnp.isfinite(values), jnp.abs(values), 0))
        close = jnp.abs(found - values) <= tolerance(x.dtype) * largest
        same = (found == values) | (jnp.isnan(found) & jnp.isnan(values))
        return jnp.all(close | same)


def stack(values: list[jax.Array]) -> jax.Array:
    """Concatenates the values of a fingerprint along the first axis."""
    return jnp.concatenate(values, axis=0)


def tolerance(dtype: Any) -> float:
    """Returns the relative difference allowed between two programs' values."""
    return 2.0**-8 if jnp.dtype(dtype).itemsize < 4 else 2.0**-16


def _close(value: Any, expected: float | None, dtype: Any) -> Any:
    if not expected:
        # NaN times zero may be zero: XLA may turn a mask's product into a select.
        return (value != value) | (value == 0)
    return abs(value - expected) <= tolerance(dtype) * abs(expected)
