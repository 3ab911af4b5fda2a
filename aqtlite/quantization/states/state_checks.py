"""Checks of the states of calibrations that callers give."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from aqtlite import config
from aqtlite.calibration import Calibration, Statistics, counting
from aqtlite.numerics import Numerics
from aqtlite.quantization.states.fixed_scale import FixedScale


def check_given(tensor: config.Tensor, state: Any, path: str) -> None:
    """Raises ValueError if a calibration that needs a state was given none.

    Args:
        tensor: config of the operand.
        state: state of the operand.
        path: path of the config, for the message.
    """
    if jax.tree.leaves(state):
        return
    what = "is learned" if tensor.calibration.is_learned else "gathers statistics"
    raise ValueError(
        f"{path}.calibration={tensor.calibration!r} {what}, and was given no state: "
        "pass states= (aqtlite.statistics makes them; in Flax, model.init does), or "
        "use a calibration that looks at the array alone, such as calibration.AbsMax()"
    )


def check_learned(tensor: config.Tensor, state: Any, path: str, ndim: int) -> None:
    """Raises ValueError if the parameters of a learned calibration are of another.

    The arguments are those of `check_statistics`.
    """
    check_given(tensor, state, path)
    wanted = _parameters(tensor.calibration, tensor.grid, ndim)
    if not isinstance(state, Mapping) or set(state) != wanted:
        found = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(
            f"{path}.calibration={tensor.calibration!r} learns {sorted(wanted)}, and "
            f"was given {found}, which is of another calibration: make the parameters "
            "again with this config"
        )


@functools.lru_cache(maxsize=1024)
def _parameters(how: Calibration, grid: Numerics, ndim: int) -> frozenset[str]:
    """Names of the parameters of a learned calibration."""
    x = jax.ShapeDtypeStruct((1,) * ndim, np.float32)
    axes = tuple(range(ndim))
    return frozenset(jax.eval_shape(lambda x: how.init_parameters(x, axes, grid), x))


def check_statistics(tensor: config.Tensor, state: Any, path: str, ndim: int) -> None:
    """Checks that a state is of a calibration that gathers statistics.

    Args:
        tensor: config of the operand.
        state: state of the operand.
        path: path of the config, for the message.
        ndim: rank of the operand.

    Raises:
        TypeError: if it is not `calibration.Statistics`, or was cast.
        ValueError: if it is of another calibration, or for another grid.
    """
    if not isinstance(state, Statistics):
        raise TypeError(
            f"{path} takes calibration.Statistics, got {type(state).__name__}: "
            "aqtlite.restored_statistics makes them of what a checkpoint holds"
        )
    name = f"{path}.calibration"
    check_calibration(tensor.calibration, tensor.grid, state.state, name, ndim)
    check_float32(state.batches, name)


def check_calibration(
    how: Calibration, grid: Numerics, state: Any, name: str, ndim: int
) -> None:
    """Checks that a state is one of a calibration for a grid.

    Args:
        how: calibration that gathers statistics.
        grid: number grid.
        state: `Statistics.state`.
        name: path of the calibration in its config, for the message.
        ndim: rank of the array.

    Raises:
        ValueError: if it is of another calibration, or for another grid.
        TypeError: if it was cast.
    """
    check_form(how, grid, state, name, ndim)
    _, _, dtypes = _form(how, grid, ndim)
    for leaf, dtype in zip(jax.tree.leaves(state), dtypes, strict=True):
        _check_dtype(leaf, dtype, name)


def check_float32(tree: Any, name: str) -> None:
    """Raises TypeError if float32 statistics were cast; `name` is for the message."""
    for leaf in jax.tree.leaves(tree):
        _check_dtype(leaf, np.dtype("float32"), name)


def _check_dtype(leaf: Any, wanted: np.dtype, name: str) -> None:
    found = getattr(leaf, "dtype", wanted)
    if found != wanted:
        raise TypeError(
            f"{name} was given statistics of {found}, which have to be {wanted}: cast "
            "and average the parameters, not the collection 'aqt_stats'. Statistics of "
            "other batches are added by aqtlite.flax.merge_statistics, or "
            "aqtlite.statistics.merge_states"
        )


def check_form(
    how: Calibration, grid: Numerics, state: Any, name: str, ndim: int
) -> None:
    """Raises ValueError if a state is of another calibration, or for another grid.

    The arguments are those of `check_calibration`.
    """
    wanted, sizes, _ = _form(how, grid, ndim)
    leaves, structure = jax.tree.flatten(state)
    if structure != wanted or not all(map(_fits, leaves, sizes)):
        raise ValueError(
            f"{name}={how!r} was given statistics of another calibration, or for "
            f"another grid than {grid!r}: gather them again with this config"
        )


_Sizes = tuple[int | None, ...]
"""The shape of an array of a state; None along the axes of the scale."""


@functools.lru_cache(maxsize=1024)
def _form(
    how: Calibration, grid: Numerics, ndim: int
) -> tuple[Any, list[_Sizes], list[np.dtype]]:
    """Structure of the state of a calibration, and sizes and dtypes of its arrays.

    Scales of two sizes tell the axes of the scale from those of the calibration's own,
    such as the number of batches in a history.
    """
    one, two = (
        jax.eval_shape(functools.partial(how.init_state, (size,) * ndim, grid))
        for size in (1, 2)
    )
    leaves, structure = jax.tree.flatten(one)
    sizes = [
        tuple(n if n == m else None for n, m in zip(x.shape, y.shape, strict=True))
        for x, y in zip(leaves, jax.tree.leaves(two), strict=True)
    ]
    return structure, sizes, [x.dtype for x in leaves]


def _fits(leaf: Any, sizes: _Sizes) -> bool:
    found = np.shape(leaf)
    return len(found) == len(sizes) and all(
        n is None or n == m for n, m in zip(sizes, found, strict=True)
    )


def check_ready(
    tensor: config.Tensor, state: Any, path: str, ndim: int, *, has_results: bool
) -> None:
    """Raises ValueError if statistics are missing, or known to be of no batch.

    Those of an operand that enters no element of the result, as an empty batch in
    `init`, are not read, and may be of no batch.

    Args:
        tensor: config of an operand with a calibration that gathers statistics.
        state: state of the operand.
        path: path of the config, for the message.
        ndim: rank of the operand.
        has_results: whether the operand enters any element of the result.
    """
    check_given(tensor, state, path)
    if isinstance(state, FixedScale):
        return
    check_statistics(tensor, state, path, ndim)
    problem = counting.problem(state.batches)
    if problem is not None and has_results:
        is_gradient = path.startswith(("dlhs.lhs", "drhs.lhs"))
        remedy = counting.REMEDY_OF_GRADIENTS if is_gradient else counting.REMEDY
        raise ValueError(f"{path}.calibration has {problem}: {remedy}")
