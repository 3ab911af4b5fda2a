"""Checks of the arguments of quantized contractions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite import config
from aqtlite.config import arithmetic
from aqtlite.operations import Operation
from aqtlite.qtensor.qtensor import Operand, QTensor
from aqtlite.quantization import quantizer
from aqtlite.quantization.statistics import States
from aqtlite.shapes.sharding import explicit_sharding


def check_config(cfg: Any, function: str) -> None:
    """Raises TypeError if a function was given anything but a config or None."""
    if cfg is not None and not isinstance(cfg, config.DotGeneral):
        raise TypeError(
            f"{function} takes a config.DotGeneral or None, got "
            f"{type(cfg).__name__}; presets such as config.fully_quantized() make one"
        )


def as_operands(lhs: Any, rhs: Any) -> tuple[Operand, Operand]:
    """Returns operands as arrays or `QTensor`s; raises TypeError for others."""
    for path, x in (("fwd.lhs", lhs), ("fwd.rhs", rhs)):
        if not hasattr(x, "shape") and not isinstance(x, int | float | list | tuple):
            raise TypeError(f"{path} must be an array, got {type(x).__name__}")
    return (
        lhs if isinstance(lhs, QTensor) else jnp.asarray(lhs),
        rhs if isinstance(rhs, QTensor) else jnp.asarray(rhs),
    )


def check_operand(
    x: Operand, tensor: config.Tensor, operation: Operation, path: str
) -> None:
    """Raises unless an operand is floating, or as its config would quantize it.

    Raises:
        TypeError: if it is of another dtype, or on another grid.
        ValueError: for blocks that are padded, if the operation takes none.
    """
    if not isinstance(x, QTensor):
        quantizer.check_floating(x, path)
        return
    _check_qtensor(x, tensor, path)
    if x.padding is not None and not operation.pairs_elements:
        raise ValueError(
            f"{path} was given a QTensor of shape {x.shape} whose blocks are padded by "
            f"{x.padding}, which dot_general and einsum alone contract; quantize it "
            "in blocks that divide its axes, or with fit=True"
        )


def _check_qtensor(q: QTensor, tensor: config.Tensor, path: str) -> None:
    """Raises TypeError if a config would not have quantized an operand so."""
    if not tensor.is_quantized:
        raise TypeError(
            f"{path} was given a QTensor of {q.qvalue.dtype} and shape {q.shape}, but "
            "its config asks for a float operand; give it the result of .dequant()"
        )
    if q.numerics is not None and q.numerics not in (
        tensor.grid,
        tensor.to_nearest().grid,
    ):
        changes = "; ".join(config.differences(q.numerics, tensor.grid))
        raise TypeError(
            f"{path} was given a QTensor of {q.qvalue.dtype} and shape {q.shape}, on "
            f"another grid than its config's: {changes}; quantize it with this config"
        )
    if q.numerics is None and q.qvalue.dtype != tensor.grid.storage_dtype:
        raise TypeError(
            f"{path} was given a QTensor of {q.qvalue.dtype} and shape {q.shape}, but "
            f"its config asks for {tensor.grid.storage_dtype}; quantize it with this "
            "config"
        )


def check_no_sharding(lhs: Operand, rhs: Operand, out_sharding: Any) -> None:
    """Raises ValueError for explicit shardings, which a `ragged_dot` does not take."""
    floats = [x for x in (lhs, rhs) if not isinstance(x, QTensor)]
    if out_sharding is not None or any(explicit_sharding(x) for x in floats):
        raise ValueError(
            "a quantized ragged_dot runs on meshes with automatic axes, and inside "
            "jax.shard_map: it takes no out_sharding, and no operand with an explicit "
            "one. Make the mesh with axis_types=(AxisType.Auto, ...)"
        )


def check_states(states: Any) -> States:
    """Returns the states of a call; raises TypeError if they are none."""
    if states is None:
        return States()
    is_states = isinstance(states, tuple) and len(states) <= len(States._fields)
    if not is_states or any(hasattr(state, "shape") for state in states):
        raise TypeError(
            "states must be aqtlite.statistics.States, as its init_states makes them, "
            f"got {states!r}"
        )
    return States(*states)


def precision_of_floats(
    cfg: config.DotGeneral, operation: Operation, precision: Any
) -> Any:
    """Returns the precision of the contractions of floats that a config leaves.

    Raises:
        ValueError: if it leaves none, or the operation has none to choose, and more
            than the default precision is asked for.
    """
    if precision is None:
        return None
    wanted = tuple(precision) if isinstance(precision, list) else precision
    if operation.takes_precision and arithmetic.contracts_floats(cfg):
        return wanted
    for one in wanted if isinstance(wanted, tuple) else (wanted,):
        if one not in (None, lax.Precision.DEFAULT, "default", "DEFAULT", "fastest"):
            raise ValueError(
                f"precision={precision!r} was asked of a quantized contraction, which "
                "has none to choose: integers are summed exactly, and rounding to "
                "them costs more than any float precision saves. Leave it None, or "
                "pass cfg=None to contract in floating point"
            )
    return None


def check_out_dtype(preferred_element_type: Any, lhs: Any, rhs: Any) -> np.dtype:
    """Returns the dtype of the result; raises TypeError if it is not floating."""
    if preferred_element_type is None:
        preferred_element_type = jnp.result_type(lhs.dtype, rhs.dtype)
    out_dtype = np.dtype(jax.dtypes.canonicalize_dtype(preferred_element_type))
    if not jnp.issubdtype(out_dtype, jnp.floating):
        raise TypeError(
            f"preferred_element_type={out_dtype.name} was asked of a quantized "
            "contraction, whose scaled result is floating; ask for a float dtype"
        )
    return out_dtype


def check_arrays(lhs: Any, rhs: Any) -> None:
    """Raises TypeError for a `QTensor` where nothing is quantized."""
    for side, x in (("lhs", lhs), ("rhs", rhs)):
        if isinstance(x, QTensor):
            raise TypeError(
                f"{side} is a QTensor of shape {x.shape}, but nothing is quantized "
                "here; give the result of .dequant()"
            )
