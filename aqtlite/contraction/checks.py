"""Checks of the operands and options of a contraction, against its config."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite import config
from aqtlite.config import arithmetic
from aqtlite.operations import Operation
from aqtlite.qtensor.qtensor import Operand, QTensor
from aqtlite.quantization import checks as array_checks
from aqtlite.quantization.states.statistics import States
from aqtlite.shapes.sharding import explicit_sharding


def check_operand(
    x: Operand, tensor: config.Tensor, operation: Operation, path: str
) -> None:
    """Raises unless an operand is floating, or quantized as its config would.

    Raises:
        TypeError: if its dtype or grid is another.
        ValueError: if its blocks are padded and the operation does not support that.
    """
    if not isinstance(x, QTensor):
        array_checks.check_floating(x, path)
        return
    _check_qtensor(x, tensor, path)
    if x.padding is not None and not operation.pairs_elements:
        raise ValueError(
            f"{path} was given a QTensor of shape {x.shape} whose blocks are padded by "
            f"{x.padding}, which dot_general and einsum alone contract; quantize it "
            "in blocks that divide its axes, or with fit=True"
        )


def _check_qtensor(q: QTensor, tensor: config.Tensor, path: str) -> None:
    """Raises TypeError if a `QTensor` is not what its config would have made."""
    if q.offset is not None:
        raise TypeError(
            f"{path} was given a QTensor of {q.qvalue.dtype} and shape {q.shape} with "
            "an offset for each block, as GGUF's minima, which no sum of products "
            "takes; give it the result of .dequant()"
        )
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


def check_rotated(x: Operand, path: str, how: config.Hadamard) -> None:
    """Raises ValueError for a `QTensor` that was rotated in another way."""
    if isinstance(x, QTensor) and x.rotation != how:
        raise ValueError(
            f"{path} was given a QTensor of shape {x.shape} with the rotation "
            f"{x.rotation}, but fwd.rotation={how!r} rotates floats before they are "
            "quantized: give floats, such as the result of .dequant(), or set "
            "fwd.rotation to None"
        )


def check_no_sharding(
    operation: Operation, lhs: Operand, rhs: Operand, out_sharding: Any
) -> None:
    """Raises ValueError for explicit shardings, which the operation does not take."""
    floats = [x for x in (lhs, rhs) if not isinstance(x, QTensor)]
    if out_sharding is not None or any(explicit_sharding(x) for x in floats):
        raise ValueError(
            f"a quantized {type(operation).__name__} runs on meshes with automatic "
            "axes, and inside jax.shard_map: it takes no out_sharding, and no operand "
            "with an explicit one. Make the mesh with axis_types=(AxisType.Auto, ...)"
        )


def checked_states(states: Any) -> States:
    """Returns the states of a call as `States`; raises TypeError for anything else.

    None is for calibrations without states.
    """
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
    """Returns the precision of the contractions that a config leaves in floats.

    Raises:
        ValueError: if more than the default precision is asked for, and the config
            leaves no contraction in floats or the operation takes no precision.
    """
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


def out_dtype(preferred_element_type: Any, lhs: Any, rhs: Any) -> np.dtype:
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
                f"{side} is a QTensor of shape {x.shape}, but this contraction is not "
                "quantized; pass its .dequant()"
            )
