"""GPTQ: weights rounded one input after the other, with errors that cancel in outputs.

Frantar et al. 2022, arXiv:2210.17323. With the second moment ``H = X^T X`` of inputs
and the error ``D = W - Q`` of the rounding, the outputs differ by ``trace(D^T H D)``.
With the Cholesky factorization ``H = U U^T`` by an upper triangular ``U``, that is the
sum of squares of ``U^T D``, whose row i contains the errors of the inputs up to i:

    e_i = sum_{j <= i} U_ji d_j

Inputs are rounded in order, so that ``e_i`` is as small as the grid allows: the target
of input i is ``w_i + sum_{j < i} (U_ji / U_ii) d_j``. These are the numbers of the
paper, whose factor of ``H^-1`` is the inverse of ``U``: after one factorization,
nothing is inverted here, which keeps the precision of float32.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite import config
from aqtlite.calibration import counting
from aqtlite.operations import Operation
from aqtlite.operations.inputs import Matrices
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization import quantizer
from aqtlite.quantization.second_moment import SecondMoment
from aqtlite.shapes import block_shapes
from aqtlite.shapes.dimension_numbers import Axes
from aqtlite.shapes.sharding import explicit_sharding, replicated

BLOCK = 128
"""Number of inputs whose errors are passed on by one product of matrices."""

NEAREST = math.inf
"""Damping that is reported for matrices that have no factorization."""


class Rounded(NamedTuple):
    """Stored values, and how they were found."""

    qvalue: jax.Array
    """Stored values, of the shape and dtype of those rounded to nearest."""

    damping: jax.Array
    """Damping of each group, float32 of shape ``(groups,)``; `NEAREST` where no
    damping helped and weights are rounded to nearest."""


def round_weights(
    nearest: QTensor,
    x: jax.Array,
    tensor: config.Tensor,
    operation: Operation,
    shape: Axes,
    state: Any,
) -> Rounded:
    """Rounds weights with the scales that they have on being rounded to nearest.

    Args:
        nearest: the weights rounded to nearest, in their own order of axes.
        x: the weights, floating, padded as `nearest` is.
        tensor: config of the weights, with a `config.Gptq`.
        operation: contraction of the weights.
        shape: shape of the weights without padding.
        state: `SecondMoment` of the inputs.

    Raises:
        ValueError: if there are no statistics, or they are of other inputs.
    """
    moment = _moment(tensor, operation, shape, state)
    if tuple(x.shape) != tuple(shape):
        moment = _padded(moment, Matrices.of(operation, shape), operation, x.shape)
    matrices = Matrices.of(operation, tuple(x.shape))

    def per_element(scale: jax.Array) -> jax.Array:
        repeated = block_shapes.repeat(replicated(scale), x.shape, range(x.ndim))
        return matrices.rows(jnp.broadcast_to(repeated, x.shape))

    weights = matrices.rows(replicated(x).astype(jnp.float32))
    rows = [weights, per_element(nearest.scale)]
    if nearest.zero_point is not None:
        rows.append(per_element(nearest.zero_point))
    # Blocks are gone: each element has its scale.
    plain = config.Tensor(numerics=tensor.grid)
    solve = functools.partial(_solve, tensor.rounding, plain)
    stored, damping = jax.vmap(solve)(moment, *rows)
    qvalue, sharding = matrices.rhs(stored), explicit_sharding(x)
    if sharding is not None:
        qvalue = jax.sharding.reshard(qvalue, sharding)
    return Rounded(qvalue, damping)


def problem(how: config.Gptq, damping: np.ndarray) -> str | None:
    """Describes how a rounding differs from its config; None if it does not.

    Args:
        how: config of the rounding.
        damping: `Rounded.damping`, concrete.
    """
    failed, raised = damping == NEAREST, damping > np.float32(how.damping)
    if failed.any():
        return (
            f"{failed.sum()} of {damping.size} second moments of inputs have no "
            "Cholesky factorization with any damping, as with NaN among the inputs; "
            "their weights are rounded to nearest"
        )
    if raised.any():
        return (
            f"{raised.sum()} of {damping.size} second moments of inputs were singular, "
            f"and took damping of {damping.max():g} instead of {how.damping:g}"
        )
    return None


def _moment(
    tensor: config.Tensor, operation: Operation, shape: Axes, state: Any
) -> jax.Array:
    if not isinstance(state, SecondMoment):
        raise ValueError(
            f"fwd.rhs.rounding={tensor.rounding!r} rounds weights of shape "
            f"{tuple(shape)} by the second moment of their inputs, of which there are "
            "no statistics: gather some, in Flax with calibrate_in_float of "
            "aqtlite.flax, and convert the variables that it returns; inside nn.scan "
            "and nn.vmap, lift the collection 'aqt_stats' along an axis"
        )
    groups, inputs, _ = Matrices.of(operation, tuple(shape)).shape
    if state.moment.shape != (groups, inputs, inputs):
        raise ValueError(
            f"fwd.rhs.rounding={tensor.rounding!r} needs a second moment of shape "
            f"{(groups, inputs, inputs)} for weights of shape {tuple(shape)}, and was "
            f"given one of {state.moment.shape}: gather statistics with this model"
        )
    is_known = counting.is_of_batches(state.batches)
    return jnp.where(is_known, state.moment, jnp.float32(jnp.nan))


def _padded(
    moment: jax.Array, matrices: Matrices, operation: Operation, shape: Axes
) -> jax.Array:
    """Adds inputs and groups of zeros, as padded weights have."""
    after = Matrices.of(operation, tuple(shape))
    old, new = (
        (*one.group_shape, *one.input_shape, *one.input_shape)
        for one in (matrices, after)
    )
    widths = [(0, b - a) for a, b in zip(old, new, strict=True)]
    groups, inputs, _ = after.shape
    return jnp.pad(moment.reshape(old), widths).reshape(groups, inputs, inputs)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _solve(
    how: config.Gptq, tensor: config.Tensor, moment: jax.Array, *rows: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Rounds one matrix.

    Args:
        how: the rounding.
        tensor: grid of the weights.
        moment: second moment of inputs, ``(inputs, inputs)``.
        *rows: weights, their scales, and their zero points if there are any, each of
            shape ``(inputs, outputs)``.

    Returns:
        The stored values and the damping.
    """
    power = jnp.diagonal(moment)
    mean = jnp.mean(power)
    mean = jnp.where(mean > 0, mean, jnp.float32(1))
    # An input that was always zero correlates with none: it is rounded to nearest.
    is_dead = power <= 0
    moment = moment / mean + jnp.diag(is_dead.astype(jnp.float32))
    if how.act_order:
        order = jnp.argsort(-power, stable=True)
        moment = moment[order][:, order]
        rows = tuple(one[order] for one in rows)
    factor, damping = _factor(moment, how.damping)
    passed_on = jnp.tril(factor.T / jnp.diagonal(factor)[:, None], -1)
    is_factor = jnp.isfinite(passed_on).all()
    passed_on = jnp.where(is_factor, passed_on, jnp.float32(0))
    stored = _rounded(tensor, passed_on, rows)
    if how.act_order:
        stored = jnp.zeros_like(stored).at[order].set(stored)
    return stored, jnp.where(is_factor, damping, jnp.float32(NEAREST))


def _factor(moment: jax.Array, damping: float) -> tuple[jax.Array, jax.Array]:
    """Returns the upper triangular factor of a matrix, and the damping it took."""
    identity = jnp.eye(moment.shape[0], dtype=jnp.float32)

    def factor(damping: jax.Array) -> jax.Array:
        # A factor of the reversed matrix is lower triangular; reversed, upper.
        reverse = (moment + damping * identity)[::-1, ::-1]
        return jnp.linalg.cholesky(reverse)[::-1, ::-1]

    def fails(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        found, damping = state
        return ~jnp.isfinite(found).all() & (damping < 1)

    def more(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        damping = state[1] * 10
        return factor(damping), damping

    first = jnp.float32(damping)
    return lax.while_loop(fails, more, (factor(first), first))


def _rounded(
    tensor: config.Tensor, passed_on: jax.Array, rows: tuple[jax.Array, ...]
) -> jax.Array:
    """Rounds rows in order, each with the errors of those before it passed on."""
    count, outputs = rows[0].shape
    size = min(BLOCK, count)
    padding = -count % size

    def in_blocks(x: jax.Array, value: float) -> jax.Array:
        widths = ((0, padding), *((0, 0),) * (x.ndim - 1))
        padded = jnp.pad(x, widths, constant_values=value)
        return padded.reshape(-1, size, *x.shape[1:])

    weights, scale, *zero_points = rows
    passed_on = jnp.pad(passed_on, ((0, 0), (0, padding)))
    blocks = (
        jnp.arange(0, count + padding, size),
        in_blocks(passed_on, 0),
        in_blocks(weights, 0),
        in_blocks(scale, 1),
        *(in_blocks(one, 0) for one in zero_points),
    )

    def round_row(target, scale, *zero_point):
        known = quantizer.Calibrated(scale, scale, *(zero_point or (None,)))
        q = quantizer.round_to_grid(target, known, tensor, None)
        return q.qvalue, q.dequant()

    def of_block(errors, block):
        start, passed_on, weights, *parameters = block
        targets = weights + jnp.matmul(passed_on, errors, precision="highest")
        within = lax.dynamic_slice_in_dim(passed_on, start, size, axis=1)

        def of_row(own, row):
            i, target, weight, passed_on, *parameters = row
            target = target + jnp.matmul(passed_on, own, precision="highest")
            stored, value = round_row(target, *parameters)
            return own.at[i].set(weight - value), stored

        own = jnp.zeros_like(weights)
        each = jnp.arange(size), targets, weights, within, *parameters
        own, stored = lax.scan(of_row, own, each)
        return lax.dynamic_update_slice_in_dim(errors, own, start, axis=0), stored

    errors = jnp.zeros_like(blocks[2].reshape(-1, outputs))
    _, stored = lax.scan(of_block, errors, blocks)
    return stored.reshape(-1, outputs)[:count]
