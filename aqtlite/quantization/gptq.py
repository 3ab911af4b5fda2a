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
from aqtlite.quantization.preparation import sparsity
from aqtlite.quantization.states import state_checks
from aqtlite.quantization.states.second_moment import SecondMoment
from aqtlite.shapes import block_shapes
from aqtlite.shapes.dimension_numbers import Axes
from aqtlite.shapes.sharding import explicit_sharding, replicated, zeros_like

SIZES = 256, 32, 8
"""Numbers of inputs whose errors are passed on by one product of matrices: to all that
follow, and within such a block, and so on."""

NEAREST = math.inf
"""Damping that is reported for matrices that have no factorization."""

UNSEEN = 0.0
"""Damping that is reported for matrices of zeros, of inputs that are always zero."""


class Rounded(NamedTuple):
    """Stored values, and how they were found."""

    qvalue: jax.Array
    """Stored values, of the shape and dtype of those rounded to nearest."""

    damping: jax.Array
    """Damping of each group, float32 of shape ``(groups,)``. Weights are rounded to
    nearest where it is `NEAREST`, since none helped, and where it is `UNSEEN`."""


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
    pruned = sparsity.of(tensor, shape, operation.axes("rhs"))
    sets = _sets(pruned, operation, matrices)
    solve = functools.partial(_solve, tensor.rounding, pruned, plain, sets)
    if moment.shape[0] == 1:
        # Without the axis of groups, XLA's products of matrices are faster.
        stored, damping = solve(moment[0], *(one[0] for one in rows))
        stored, damping = stored[None], damping[None]
    else:
        stored, damping = jax.vmap(solve)(moment, *rows)
    qvalue, sharding = matrices.rhs(stored), explicit_sharding(x)
    if sharding is not None:
        qvalue = jax.sharding.reshard(qvalue, sharding)
    return Rounded(qvalue, damping)


def describe(how: config.Gptq, damping: np.ndarray) -> str:
    """Describes how weights were rounded.

    Args:
        how: config of the rounding.
        damping: `Rounded.damping`, concrete.
    """
    what, text = "rounded by GPTQ at conversion", problem(how, damping)
    if ((damping == NEAREST) | (damping == UNSEEN)).all():
        what = "rounded to nearest instead of by GPTQ"
    return what if text is None else f"{what}: {text}"


def problem(how: config.Gptq, damping: np.ndarray) -> str | None:
    """Describes how a rounding differs from its config; None if it does not.

    Args:
        how: config of the rounding.
        damping: `Rounded.damping`, concrete.
    """
    failed, unseen = damping == NEAREST, damping == UNSEEN
    raised = damping > np.float32(how.damping)
    if failed.any():
        return (
            f"{failed.sum()} of {damping.size} second moments of inputs have no "
            "Cholesky factorization with any damping; their weights are rounded to "
            "nearest"
        )
    if unseen.any():
        return (
            f"{unseen.sum()} of {damping.size} second moments of inputs are zero, as "
            "of an expert that saw no row; their weights are rounded to nearest"
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
    state_checks.check_float32(state, "fwd.rhs.rounding")
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


def _sets(
    how: config.NofM | None, operation: Operation, matrices: Matrices
) -> np.ndarray:
    """Returns the inputs that are pruned together, int32 of shape ``(sets, size)``.

    Without sparsity each input is a set. The number of inputs stands for none.
    """
    shape = matrices.input_shape
    count = math.prod(shape)
    inputs = np.arange(count, dtype=np.int32)
    if how is None:
        return inputs[:, None]
    place = matrices.place_of(operation.axes("rhs").cuttable[-1])
    inputs = np.moveaxis(inputs.reshape(shape), place, -1)
    widths = [(0, 0)] * (inputs.ndim - 1) + [(0, -inputs.shape[-1] % how.m)]
    return np.pad(inputs, widths, constant_values=count).reshape(-1, how.m)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _solve(
    how: config.Gptq,
    pruned: config.NofM | None,
    tensor: config.Tensor,
    sets: jax.Array,
    moment: jax.Array,
    *rows: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Rounds one matrix.

    Args:
        how: the rounding.
        pruned: what is pruned of each set of inputs; None for nothing.
        tensor: grid of the weights.
        sets: sets of inputs, as `_sets` returns them.
        moment: second moment of inputs, ``(inputs, inputs)``.
        *rows: weights, their scales, and their zero points if there are any, each of
            shape ``(inputs, outputs)``.

    Returns:
        The stored values and the damping.
    """
    power = jnp.diagonal(moment)
    mean = jnp.mean(power)
    mean = jnp.where(mean > 0, mean, jnp.float32(1))
    order = sets
    if how.act_order:
        powers = jnp.take(power, sets, mode="fill", fill_value=0)
        order = sets[jnp.argsort(-powers.sum(1), stable=True)]
    order = order.reshape(-1)
    weights, *parameters = rows
    weights = jnp.take(weights, order, 0, mode="fill", fill_value=0)
    parameters = [jnp.take(one, order, 0, mode="clip") for one in parameters]
    moment = jnp.take(moment, order, 0, mode="fill", fill_value=0)
    moment = jnp.take(moment, order, 1, mode="fill", fill_value=0)
    # An input that was always zero correlates with none: it is rounded to nearest.
    is_dead = jnp.diagonal(moment) <= 0
    moment = moment / mean + jnp.diag(is_dead.astype(jnp.float32))
    factor, damping = _factor(moment, how.damping)
    diagonal = jnp.diagonal(factor)
    passed_on = jnp.tril(factor.T / diagonal[:, None], -1)
    is_factor = jnp.isfinite(passed_on).all()
    passed_on = jnp.where(is_factor, passed_on, jnp.float32(0))
    # The error of an output if its weight of this input is 0, and the others follow.
    price = jnp.where(is_factor, diagonal, jnp.float32(1))
    price = jnp.where(is_dead, jnp.float32(0), price)
    stored = _rounded(tensor, pruned, passed_on, price, weights, parameters)
    stored = jnp.zeros(rows[0].shape, stored.dtype).at[order].set(stored, mode="drop")
    damping = jnp.where(is_factor, damping, jnp.float32(NEAREST))
    return stored, jnp.where(is_dead.all(), jnp.float32(UNSEEN), damping)


def _factor(moment: jax.Array, damping: float) -> tuple[jax.Array, jax.Array]:
    """Returns the upper triangular factor of a matrix, and the damping it took."""
    # A factor of the reversed matrix is lower triangular; reversed, upper.
    reverse = moment[::-1, ::-1]
    identity = jnp.eye(moment.shape[0], dtype=jnp.float32)

    def factor(damping: jax.Array) -> jax.Array:
        return lax.linalg.cholesky(reverse + damping * identity, symmetrize_input=False)

    def fails(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        found, damping = state
        return ~jnp.isfinite(found).all() & (damping < 1)

    def more(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        damping = state[1] * 10
        return factor(damping), damping

    first = jnp.float32(damping)
    found, damping_found = lax.while_loop(fails, more, (factor(first), first))
    return found[::-1, ::-1], damping_found


class _Rows(NamedTuple):
    """Inputs that are rounded one after the other, along the leading axis."""

    target: jax.Array
    """Weights with the errors of all inputs before these passed on."""

    weights: jax.Array
    price: jax.Array
    """Factors of the weights, by which those to be pruned are chosen."""

    parameters: tuple[jax.Array, ...]
    """Scales and zero points."""

    is_kept: jax.Array | None = None
    """Whether weights are kept; None for all."""


def _rounded(
    tensor: config.Tensor,
    pruned: config.NofM | None,
    passed_on: jax.Array,
    price: jax.Array,
    weights: jax.Array,
    parameters: list[jax.Array],
) -> jax.Array:
    """Rounds rows in order, each with the errors of those before it passed on."""
    count = len(weights)
    unit = 1 if pruned is None else pruned.m
    sizes = [max(size // unit, 1) * unit for size in SIZES if size < count]
    sizes = [*sizes, unit] if unit > 1 else sizes
    padding = -count % (sizes[0] if sizes else 1)

    def padded(x: jax.Array, **how: Any) -> jax.Array:
        return jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1)), **how)

    passed_on = jnp.pad(passed_on, (0, padding))
    rows = _Rows(
        padded(weights),
        padded(weights),
        padded(price[:, None]),
        tuple(padded(one, mode="edge") for one in parameters),
    )
    round_rows = functools.partial(_round_rows, tensor, pruned)
    _, stored = round_rows(tuple(sizes), passed_on, rows)
    return stored[:count]


def _round_rows(
    tensor: config.Tensor,
    pruned: config.NofM | None,
    sizes: tuple[int, ...],
    passed_on: jax.Array,
    rows: _Rows,
) -> tuple[jax.Array, jax.Array]:
    """Rounds rows in order, in blocks of blocks.

    Args:
        tensor: the grid.
        pruned: what is pruned.
        sizes: number of rows in a block, in a block of that, and so on.
        passed_on: factors of the errors of rows that are added to later rows.
        rows: the rows.

    Returns:
        The errors and the stored values.
    """
    count = len(rows.target)
    if pruned is not None and count == pruned.m:
        # As if none of these rows were rounded: each compensates those before it.
        passed = lax.linalg.triangular_solve(
            passed_on,
            rows.target - rows.weights,
            left_side=True,
            lower=True,
            unit_diagonal=True,
        )
        score = jnp.abs((rows.weights + passed) * rows.price)
        rows = rows._replace(is_kept=sparsity.largest(score, 0, pruned.n))
    if count == 1:
        return _round_to_grid(tensor, rows)
    size = sizes[0] if sizes else 1

    def in_blocks(x: jax.Array) -> jax.Array:
        return x.reshape(-1, size, *x.shape[1:])

    def of_block(errors, block):
        start, passed_on, rows = block

        def of_part(i, target):
            part = lax.dynamic_slice_in_dim(passed_on, i * size, size, axis=1)
            own = lax.dynamic_slice_in_dim(errors, i * size, size)
            return target + jnp.matmul(part, own, precision="highest")

        if size > SIZES[1]:
            # Rows from `start` on have no errors yet.
            target = lax.fori_loop(0, start // size, of_part, rows.target)
        else:
            before = jnp.matmul(passed_on, errors, precision="highest")
            target = rows.target + before
        within = lax.dynamic_slice_in_dim(passed_on, start, size, axis=1)
        rows = rows._replace(target=target)
        own, stored = _round_rows(tensor, pruned, sizes[1:], within, rows)
        return lax.dynamic_update_slice_in_dim(errors, own, start, axis=0), stored

    blocks = (jnp.arange(0, count, size), *jax.tree.map(in_blocks, (passed_on, rows)))
    errors, stored = lax.scan(of_block, zeros_like(rows.target), blocks)
    return errors, stored.reshape(count, -1)


def _round_to_grid(tensor: config.Tensor, rows: _Rows) -> tuple[jax.Array, jax.Array]:
    """Returns the errors and the stored values of rows."""
    target, (scale, *zero_point) = rows.target, rows.parameters
    if rows.is_kept is not None:
        target = jnp.where(rows.is_kept, target, jnp.float32(0))
    known = quantizer.Calibrated(scale, scale, *(zero_point or (None,)))
    q = quantizer.round_to_grid(target, known, tensor, None)
    return rows.weights - q.dequant(), q.qvalue
