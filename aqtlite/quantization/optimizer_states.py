"""States of optimizers that are quantized between steps."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

from aqtlite import config, errors
from aqtlite.numerics import DynamicTree
from aqtlite.qtensor import codes
from aqtlite.qtensor.qtensor import QTensor, dequantized
from aqtlite.quantization.quantize import quantize

_DEFAULT = config.OptimizerStates()
_FIRST, _SECOND = ("mu", "trace"), ("nu", "nu_max", "sum_of_squares")
"""Fields of first and second moments in the states of optax."""


def quantize_optimizer(
    tx: optax.GradientTransformation, cfg: config.OptimizerStates = _DEFAULT
) -> optax.GradientTransformationExtraArgs:
    """Holds the moments in the state of an optimizer in 8 bits between steps.

    `update` dequantizes them, calls `tx` in float, and quantizes what it leaves, to
    nearest. Which arrays of the state are moments, and which of these are quantized, is
    decided by their paths and sizes. The state is that of `tx` with a `QTensor` in
    place of each of them: it works in `jax.jit`, `jax.lax.scan`, with donation,
    sharding and checkpoints (for `flax.serialization`, import `aqtlite.flax`), and `tx`
    may be inside of other transformations or around them. A state of `tx` itself is
    taken, too, and quantized by its first step.

    >>> import optax
    >>> tx = quantize_optimizer(optax.adam(1e-3))
    >>> state = tx.init({"kernel": jnp.ones((64, 256)), "bias": jnp.ones(256)})
    >>> state[0].nu
    {'bias': Array(..., 'kernel': QTensor(uint8[64,256], scale=float32[64,1], ...)}
    >>> sum(x.nbytes for x in jax.tree.leaves(state))
    35332

    A block of a moment with a NaN or an infinity becomes NaN as a whole, and so does a
    second moment that is negative anywhere; `optax.apply_if_finite` around the result
    keeps such updates from the state.

    Args:
        tx: any transformation of optax.
        cfg: the grids, and the arrays that they are for.

    Returns:
        A transformation like `tx`.

    Raises:
        TypeError: if `tx` is no transformation, or `cfg` no `config.OptimizerStates`.
        ValueError: when it is initialized, if the state has arrays of floats and the
            path of none is that of a moment, if it is of `optax.sm3` and no patterns
            are given, or if blocks do not divide an array.
    """
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            "quantize_optimizer takes a transformation of optax, such as "
            f"optax.adamw(1e-3), got {errors.brief(tx)}"
        )
    if not isinstance(cfg, config.OptimizerStates):
        raise TypeError(
            f"cfg must be a config.OptimizerStates, got {errors.brief(cfg)}"
        )
    inner = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        state = inner.init(params)
        _check_has_moments(cfg, state)
        quantized = _quantized(cfg, state)
        before, after = map(codes.stored_bytes, (state, quantized))
        logging.info("optimizer state: %d bytes in place of %d", after, before)
        return quantized

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        in_float = _dequantized(cfg, state)
        updates, after = inner.update(updates, in_float, params, **extra)
        return updates, _quantized(cfg, after)

    return optax.GradientTransformationExtraArgs(init, update)


def _quantized(cfg: config.OptimizerStates, state: Any) -> Any:
    def of_leaf(path: Any, x: Any) -> Any:
        name = _name(path)
        tensor = _tensor_of(cfg, path)
        if tensor is None or not _is_float(x) or x.size < max(cfg.min_size, 1):
            return x
        if re.fullmatch(cfg.in_float, name):
            return x
        with errors.naming(name):
            q = quantize(x, tensor, _axis(tensor, x.shape))
        grid = tensor.grid
        if isinstance(grid, DynamicTree) and not grid.signed:
            # Clipped to zero, it would be another moment.
            scale = jnp.where(jnp.any(x < 0), jnp.float32(jnp.nan), q.scale)
            q = dataclasses.replace(q, scale=scale)
        return q

    return jax.tree.map_with_path(of_leaf, state)


def _tensor_of(cfg: config.OptimizerStates, path: Any) -> config.Tensor | None:
    """Returns the config of a moment by its path; None if it is of none."""
    if _is_of(cfg.second_moments, _SECOND, path):
        return cfg.second
    return cfg.first if _is_of(cfg.first_moments, _FIRST, path) else None


def _is_of(pattern: str | None, fields: tuple[str, ...], path: Any) -> bool:
    """Whether a path matches a pattern or, if it is None, is in one of some fields."""
    if pattern is not None:
        return re.fullmatch(pattern, _name(path)) is not None
    # States are tuples with fields, and parameters come below. A state that was
    # restored without a target has dictionaries in place of both.
    names = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
    names = names or _name(path).split("/")
    return next((name for name in names if name in _FIRST + _SECOND), None) in fields


def _axis(tensor: config.Tensor, shape: tuple[int, ...]) -> int:
    """Returns the axis to cut into blocks: that of the largest ones, the last of these.

    Blocks along one axis, unlike those of all elements in a row, stay within shards.
    """
    blocks = tensor.blocks
    if blocks is None:
        return len(shape) - 1
    fits: Callable[[int], int] = blocks.count_of if blocks.fit else lambda _: 1
    sizes = [size // fits(size) for size in shape]
    return max(range(len(shape)), key=lambda axis: (sizes[axis], axis))


def _check_has_moments(cfg: config.OptimizerStates, state: Any) -> None:
    """Raises ValueError if the state has arrays of floats, and none is a moment.

    Also for SM3, whose momentum has the name of second moments.
    """
    nodes = jax.tree.leaves(state, is_leaf=_is_of_sm3)
    if cfg.second_moments is None and any(map(_is_of_sm3, nodes)):
        raise ValueError(
            "the state of optax.sm3 calls its momentum nu, as others call second "
            "moments: give cfg=config.OptimizerStates(first_moments='.*nu/.*', "
            "second_moments='(?!)'), which matches nothing"
        )
    leaves = jax.tree.leaves_with_path(state)
    paths = [path for path, x in leaves if _is_float(x)]
    if paths and not any(_tensor_of(cfg, path) for path in paths):
        names = list(map(_name, paths))
        raise ValueError(
            "no array in the state of the optimizer is a moment by its path: give "
            "cfg=config.OptimizerStates(first_moments=..., second_moments=...) with "
            f"regular expressions of paths, which are {', '.join(names[:8])}"
            + ("" if len(names) <= 8 else ", ...")
        )


def _is_of_sm3(x: Any) -> bool:
    return isinstance(x, optax.ScaleBySM3State)


def _is_float(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    return is_float and jnp.ndim(x) > 0


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _dequantized(cfg: config.OptimizerStates, state: Any) -> Any:
    def of_leaf(path: Any, x: Any) -> Any:
        tensor = _tensor_of(cfg, path)
        if isinstance(x, Mapping) and tensor is not None:
            x = QTensor(**x, dtype=np.dtype("float32"), numerics=tensor.grid)
        return dequantized(x)

    return jax.tree.map_with_path(of_leaf, state, is_leaf=_is_quantized)


def _is_quantized(x: Any) -> bool:
    return isinstance(x, QTensor) or _is_taken_apart(x)


def _is_taken_apart(x: Any) -> bool:
    """Whether a mapping has the arrays of a `QTensor`.

    `nnx.Optimizer.update` leaves such in its state, and checkpoints that are restored
    without a target have them.
    """
    if not isinstance(x, Mapping) or not {"qvalue", "scale"} <= set(x):
        return False
    return jnp.result_type(x["qvalue"]).itemsize == 1  # Moments have more bytes.
