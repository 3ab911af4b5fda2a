"""Products with Hadamard matrices, in additions of one order.

A Hadamard matrix of order n has entries 1 and -1 and orthogonal columns. Its product
with a vector is computed by additions and subtractions of float32 in an order that
depends on n alone, after one product that scales the vector. So it has the same bits in
every program: a fused multiply-add with 1 or -1 rounds once, as a sum does, and loops
keep the scaling apart from the sums.
"""

import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.shapes import block_shapes

LARGEST_FACTOR = 512
"""Largest order of a matrix that is not a Kronecker product of smaller ones."""

_RADIX = 4
"""Number of terms that one pass over an array adds up."""


def has_order(n: int) -> bool:
    """Returns True if a Hadamard matrix of this order is known here.

    These are powers of two from 4 on, and multiples of 4 whose odd part gives a matrix
    of Paley's constructions, times a power of two. Order 2 is left out: pairs are not
    worth a pass.

    >>> [n for n in range(3, 200, 4) if not has_order(n + 1)]
    [51, 91, 99, 115, 155, 171, 183, 187]
    """
    return n >= 4 and n % 4 == 0 and _factors(n) is not None


def largest_order(n: int, size: int | None = None) -> int:
    """Returns the largest order of the blocks into which an axis can be divided.

    That is `n` if a matrix of this order is known, otherwise the largest power of two
    that divides `n`; 1 if that is below 4.

    >>> largest_order(96), largest_order(172), largest_order(7), largest_order(96, 64)
    (96, 4, 1, 32)

    Args:
        n: size of the axis.
        size: largest order that is wanted; None for any.
    """
    if n < 4:
        return 1
    limit = n if size is None else min(n, size)
    if n % limit == 0 and has_order(limit):
        return limit
    power = n & -n
    while power > limit:
        power //= 2
    return power if power >= 4 else 1


@functools.partial(jax.jit, static_argnames=("axis", "order", "seed"), inline=True)
def rotated(x: jax.Array, axis: int, order: int, seed: int) -> jax.Array:
    """Multiplies blocks along an axis with an orthogonal matrix.

    The matrix is ``D H / sqrt(order)``, with a diagonal of random signs D and a
    Hadamard matrix H. The gradient is multiplied with the transposed matrix.

    Args:
        x: float32 or float64.
        axis: axis, of a size that `order` divides.
        order: order of the matrix, one that `has_order`.
        seed: seed of the signs.
    """
    blocks = block_shapes.split_axis(x, axis, x.shape[axis] // order)
    return block_shapes.merge(_times(axis + 1, seed, False, blocks), like=x)


@functools.partial(jax.jit, static_argnames=("axis", "order", "seed"), inline=True)
def rotated_back(x: jax.Array, axis: int, order: int, seed: int) -> jax.Array:
    """Multiplies blocks along an axis with the transposed matrix of `rotated`."""
    blocks = block_shapes.split_axis(x, axis, x.shape[axis] // order)
    return block_shapes.merge(_times(axis + 1, seed, True, blocks), like=x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _times(axis: int, seed: int, transposed: bool, x: jax.Array) -> jax.Array:
    """Multiplies an axis with an orthogonal matrix, or with the transposed one."""
    order = x.shape[axis]
    along = [-1 if i == axis else 1 for i in range(x.ndim)]
    signs = _signs(seed, order).astype(x.dtype).reshape(along)
    unit = np.asarray(1 / math.sqrt(order), x.dtype)
    if transposed:
        return _sums(x * unit, axis, transposed) * signs
    return _sums(x * (signs * unit), axis, transposed)


def _times_fwd(axis: int, seed: int, transposed: bool, x: jax.Array):
    return _times(axis, seed, transposed, x), None


def _times_bwd(axis: int, seed: int, transposed: bool, _: None, g: jax.Array):
    return (_times(axis, seed, not transposed, g),)


_times.defvjp(_times_fwd, _times_bwd)


def _sums(x: jax.Array, axis: int, transposed: bool) -> jax.Array:
    """Multiplies an axis with a Hadamard matrix, or with the transposed one.

    The matrix is a Kronecker product. Each pass multiplies with one factor, along the
    most significant digit of the index, which becomes the least significant one; after
    all passes, the digits are in their order again.
    """
    factors = _factors(x.shape[axis])
    assert factors is not None
    paley, twos = factors
    if paley > 1:
        matrix = _paley(paley)
        x = _pass(x, axis, matrix.T if transposed else matrix)
    # A loop of a single turn would be fused with the product before it.
    radix = 2 if twos == 3 else _RADIX
    turns, rest = divmod(twos, int(math.log2(radix)))
    if turns:
        matrix = _sylvester(radix)
        x = lax.fori_loop(0, turns, lambda _, x: _pass(x, axis, matrix), x)
    return _pass(x, axis, _sylvester(2)) if rest else x


def _pass(x: jax.Array, axis: int, matrix: np.ndarray) -> jax.Array:
    """Multiplies the most significant digit of an axis, and makes it the least."""
    radix, size = len(matrix), x.shape[axis]
    parts = x.reshape(*x.shape[:axis], radix, size // radix, *x.shape[axis + 1 :])
    along = [radix if i == axis + 1 else 1 for i in range(parts.ndim)]

    def terms(start: jax.Array | int, rows: Any) -> list[jax.Array]:
        """Digit j of the input, with the signs that it has in all digits of the sum."""
        taken = lax.dynamic_slice_in_dim(parts, start, len(rows), axis)
        return [
            jnp.expand_dims(lax.index_in_dim(taken, j, axis, keepdims=False), axis + 1)
            * row.reshape(along)
            for j, row in enumerate(rows)
        ]

    rows = matrix.astype(x.dtype)
    if radix <= _RADIX:
        return functools.reduce(operator.add, terms(0, rows)).reshape(x.shape)
    groups = jnp.asarray(rows.reshape(-1, _RADIX, radix))

    def add_group(i: jax.Array, total: jax.Array) -> jax.Array:
        return functools.reduce(operator.add, terms(i * _RADIX, groups[i]), total)

    total = lax.full_like(jnp.broadcast_arrays(*terms(0, rows[:1]))[0], 0)
    return lax.fori_loop(0, len(groups), add_group, total).reshape(x.shape)


@functools.lru_cache(maxsize=1024)
def _factors(n: int) -> tuple[int, int] | None:
    """Returns the order of a matrix of Paley and the power of two beside it.

    None if no matrix of order `n` is known.
    """
    twos = (n & -n).bit_length() - 1
    odd = n >> twos
    if odd == 1:
        return 1, twos
    for rest in range(twos - 2, -1, -1):
        order = n >> rest
        if order > LARGEST_FACTOR:
            break
        if _is_prime(order - 1) or (order % 8 == 4 and _is_prime(order // 2 - 1)):
            return order, rest
    return None


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % divisor for divisor in range(2, math.isqrt(n) + 1))


@functools.lru_cache(maxsize=64)
def _paley(order: int) -> np.ndarray:
    """Returns a matrix by the construction of Paley (1933), of entries 1 and -1."""
    is_first = _is_prime(order - 1)
    prime = order - 1 if is_first else order // 2 - 1
    is_square = np.isin(np.arange(prime), np.arange(1, prime) ** 2 % prime)
    character = np.where(is_square, 1, -1)
    character[0] = 0
    shifts = np.subtract.outer(np.arange(prime), np.arange(prime)) % prime
    border = np.ones((prime, 1), int)
    if is_first:
        core = np.block([[0, border.T], [-border, character[shifts]]])
        return core + np.eye(order, dtype=int)
    core = np.block([[0, border.T], [border, character[shifts]]])
    diagonal = np.eye(prime + 1, dtype=int)
    first, second = np.array([[1, 1], [1, -1]]), np.array([[1, -1], [-1, -1]])
    return np.kron(core, first) + np.kron(diagonal, second)


def _sylvester(order: int) -> np.ndarray:
    matrix = np.ones((1, 1), int)
    while len(matrix) < order:
        matrix = np.kron(np.array([[1, 1], [1, -1]]), matrix)
    return matrix


@functools.lru_cache(maxsize=64)
def _signs(seed: int, order: int) -> np.ndarray:
    """Returns random signs: the same ones with every version of NumPy."""
    return np.random.RandomState(seed).randint(0, 2, order) * 2 - 1
