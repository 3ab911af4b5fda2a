"""Infers the mapped axes of registered operations inside `jax.vmap`.

When JAX maps the call of a function, mapped axes stay where they are, and the equation
does not record them. They are inferred from shapes and the reference: of all axes that
could be mapped, few give the shapes of the call's results.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

OF_REFERENCES = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    NotImplementedError,
)
"""Errors of a reference that does not take some arrays."""

_MOST = 1024
"""Largest number of readings to try."""

Shapes = Sequence[jax.ShapeDtypeStruct]


class Reading(NamedTuple):
    """Mapped axes of a call's arrays, as one possible interpretation of the call."""

    inputs: tuple[int | None, ...]
    """Mapped axis of each input, or None; all None for a call that is not mapped."""

    outputs: tuple[int, ...] = ()
    """Mapped axis of each output; empty for a call that is not mapped."""

    def of(self, reference: Callable[..., Any]) -> Callable[..., list[Any]]:
        """Returns the reference mapped over these axes, with flat results."""

        def flat(*args: Any) -> list[Any]:
            return jax.tree.leaves(reference(*args))

        if set(self.inputs) <= {None}:
            return flat
        return jax.vmap(flat, self.inputs, list(self.outputs))


def readings(
    reference: Callable[..., Any], inputs: Shapes, wanted: Shapes
) -> list[Reading]:
    """Returns all readings of a call inside `jax.vmap` that fit its results.

    Args:
        reference: reference of the operation.
        inputs: inputs of the call.
        wanted: results of the call.

    Raises:
        ValueError: if there are too many to try.
    """
    found = []
    for number, axes in enumerate(_axes(inputs)):
        if number >= _MOST:
            raise ValueError("there are too many axes that a jax.vmap could map")
        first = Reading(axes, (0,) * len(wanted))
        try:
            results = jax.eval_shape(first.of(reference), *inputs)
        except OF_REFERENCES:
            continue
        if len(results) != len(wanted):
            continue
        if set(axes) <= {None}:
            found += [Reading(axes)] if _same(results, wanted) else []
            continue
        places = (_places(x, one) for x, one in zip(results, wanted, strict=True))
        found += [Reading(axes, outputs) for outputs in itertools.product(*places)]
    return found


def agree(
    reference: Callable[..., Any], found: Sequence[Reading], inputs: Shapes
) -> bool:
    """Whether readings give equal results on small random arrays.

    Axes have equal sizes there if and only if their sizes in `inputs` are equal.
    """
    sizes = sorted({size for x in inputs for size in x.shape if size > 1})
    small = {1: 1, 0: 0, **{size: 2 + i for i, size in enumerate(sizes)}}
    rng = np.random.default_rng(0)
    with jax.ensure_compile_time_eval():
        arrays = [_random(rng, [small[n] for n in x.shape], x.dtype) for x in inputs]
        try:
            results = [reading.of(reference)(*arrays) for reading in found]
        except OF_REFERENCES:
            return False
    first, *others = results
    return all(all(map(_close, first, other)) for other in others)


def _axes(inputs: Shapes) -> Iterator[tuple[int | None, ...]]:
    """Yields the axes that could be mapped: none, or some of equal size."""
    yield (None,) * len(inputs)
    for size in sorted({size for x in inputs for size in x.shape}):
        choices = [
            (None, *(axis for axis, n in enumerate(x.shape) if n == size))
            for x in inputs
        ]
        for axes in itertools.product(*choices):
            if set(axes) != {None}:
                yield axes


def _places(result: Any, wanted: Any) -> list[int]:
    """Returns the positions in `wanted` that fit `result`'s leading, mapped axis."""
    if result.dtype != wanted.dtype or result.ndim != wanted.ndim:
        return []
    first, *others = result.shape
    return [
        axis
        for axis in range(result.ndim)
        if (*others[:axis], first, *others[axis:]) == tuple(wanted.shape)
    ]


def _same(results: Shapes, wanted: Shapes) -> bool:
    return [(x.shape, x.dtype) for x in results] == [(x.shape, x.dtype) for x in wanted]


def _random(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(rng.normal(size=shape), dtype)
    return jnp.asarray(rng.integers(0, 2, size=shape), dtype)


def _close(first: Any, second: Any) -> bool:
    if first.shape != second.shape:
        return False
    one, other = (np.asarray(x, np.float64) for x in (first, second))
    largest = float(np.max(np.abs(one))) if math.prod(one.shape) else 0.0
    return bool(np.allclose(one, other, rtol=0, atol=1e-2 * largest, equal_nan=True))
