"""Histograms of magnitudes by powers of two, of ranges that are not known yet."""

import jax
import jax.numpy as jnp
import numpy as np

_SMALLEST, _LARGEST = -64, 64
"""The exponents that are told apart."""


def none() -> jax.Array:
    """The histogram of no elements."""
    return jnp.zeros(_LARGEST - _SMALLEST, jnp.float32)


def of(x: jax.Array) -> jax.Array:
    """The histogram of the elements of an array that are not zero."""
    _, exponents = jnp.frexp(x)
    places = jnp.clip(exponents - _SMALLEST, 0, _LARGEST - _SMALLEST - 1)
    return none().at[places].add((x != 0).astype(jnp.float32))


def share_below(histogram: np.ndarray, bound: float) -> float:
    """The share of elements that are below a bound for certain."""
    # An exponent e is that of magnitudes below 2**e.
    ends = np.exp2(np.arange(_SMALLEST, _LARGEST, dtype=np.float64))
    total = float(histogram.sum())
    return float(histogram[ends <= bound].sum()) / total if total else 0.0
