"""How a program moves the elements of arrays that it does not change.

The program that a model quantizes a weight with may transpose, reshape and stack it. If
its equations only rearrange one array, they rearrange any other. What other programs do
is found by running them on the places of elements: if each place comes out once, the
arrays are only moved.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives

from aqtlite.jaxpr import equations

Movement = Callable[[Sequence[np.ndarray]], np.ndarray]
"""Function from arrays of the sources' shapes and any dtype to the moved elements."""

_IN_ORDER = {primitives.squeeze_p, primitives.broadcast_in_dim_p, primitives.copy_p}
"""Primitives that keep the elements in order, if they keep their number."""


def of_program(
    program: Callable[..., Any],
    shapes: Sequence[tuple[int, ...]],
    wanted: tuple[int, ...],
) -> Movement | None:
    """Finds how a program moves elements; None if it changes or copies some.

    Args:
        program: function from float arrays to one array.
        shapes: shapes of its arguments.
        wanted: shape of the result.
    """
    if len(shapes) == 1:
        of_float = jax.ShapeDtypeStruct(shapes[0], np.float32)
        closed = jax.make_jaxpr(program)(of_float)
        if closed.out_avals[0].shape == wanted and _is_permutation(closed.jaxpr):
            return lambda arrays: _permuted(closed.jaxpr, arrays[0])
    places = _places(program, shapes, wanted)
    if places is None:
        return None
    return lambda arrays: np.concatenate([x.reshape(-1) for x in arrays])[places]


def _is_permutation(jaxpr: Any) -> bool:
    """Whether each equation rearranges all elements of the result before it."""
    last = jaxpr.invars[0]
    for eqn in jaxpr.eqns:
        if list(eqn.invars) != [last] or len(eqn.outvars) != 1 or not _permutes(eqn):
            return False
        (last,) = eqn.outvars
    return list(jaxpr.outvars) == [last]


def _permutes(eqn: Any) -> bool:
    """Whether an equation of one operand only rearranges the operand's elements."""
    body = equations.called_body(eqn)
    if body is not None:
        return _is_permutation(body.jaxpr)
    (x,), (out,) = eqn.invars, eqn.outvars
    if eqn.primitive is primitives.convert_element_type_p:
        # Integers and floats of 8 bits would round.
        dtype = out.aval.dtype
        return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1
    if eqn.primitive is primitives.reshape_p:
        return eqn.params["dimensions"] is None
    is_in_order = eqn.primitive in _IN_ORDER and x.aval.size == out.aval.size
    return is_in_order or eqn.primitive is primitives.transpose_p


def _permuted(jaxpr: Any, x: np.ndarray) -> np.ndarray:
    """Rearranges an array as a jaxpr for which `_is_permutation` holds."""
    for eqn in jaxpr.eqns:
        body = equations.called_body(eqn)
        if body is not None:
            x = _permuted(body.jaxpr, x)
        elif eqn.primitive is primitives.transpose_p:
            x = x.transpose(eqn.params["permutation"])
        else:
            x = x.reshape(eqn.outvars[0].aval.shape)
    return x


def _places(
    program: Callable[..., Any],
    shapes: Sequence[tuple[int, ...]],
    wanted: tuple[int, ...],
) -> np.ndarray | None:
    """Where elements come from; None if they are changed, or copied.

    Places go through the function a byte at a time, which every float dtype of a model
    holds, bfloat16 included.

    Args:
        program: as in `of_program`.
        shapes: shapes of the sources, which count flattened, one after the other.
        wanted: shape of the result.
    """
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    size = int(ends[-1])

    def run(flat: np.ndarray) -> np.ndarray | None:
        parts = np.split(flat.astype(np.float32), ends[:-1])
        given = [x.reshape(shape) for x, shape in zip(parts, shapes, strict=True)]
        made = np.asarray(program(*given)).astype(np.float32, copy=False)
        return made if made.shape == wanted else None

    # Weights are large: four bytes for each place, of which each is a digit.
    dtype = np.dtype("<u4" if size <= 2**32 else "<u8")
    ours, found = np.arange(size, dtype=dtype), np.zeros(wanted, dtype)
    of_ours, of_found = (x[..., None].view(np.uint8) for x in (ours, found))
    for digit in range(-(-max(size - 1, 1).bit_length() // 8)):
        made = run(of_ours[:, digit])
        if made is None or not _are_bytes(made):
            return None
        of_found[..., digit] = made
    if found.max() >= size:
        return None
    is_taken = np.zeros(size, bool)
    is_taken[found] = True
    if np.count_nonzero(is_taken) < found.size:
        return None
    # Nothing is added that is zero for these places, such as the first element.
    other = np.random.default_rng(0).integers(1, 256, size, np.uint8)
    made = run(other)
    is_moved = made is not None and np.array_equal(made, other[found])
    return found if is_moved else None


def _are_bytes(x: np.ndarray) -> bool:
    """Whether floats are integers of 8 bits."""
    is_within = x.min(initial=0) >= 0 and x.max(initial=0) <= 255
    return bool(is_within and (np.rint(x) == x).all())
