"""Checks of the fields of a contraction's config, most of which concern one operand."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from aqtlite.config.tensor import Tensor

if TYPE_CHECKING:
    from aqtlite.config.dot_general import DotGeneralRaw


def as_dtype(name: str, value: Any) -> np.dtype | None:
    """Normalizes a dtype to native byte order."""
    if value is None:
        return None
    try:
        dtype: np.dtype = jnp.dtype(jnp.dtype(value).name)
        return dtype
    except TypeError as error:
        raise TypeError(
            f"{name} must be a dtype such as jnp.float32 or 'int32', or None, "
            f"got {value!r}"
        ) from error


def check_int32_accumulator(path: str, tensor: Tensor, prefix: str = "") -> None:
    """Raises ValueError unless an operand is contracted as integers.

    Args:
        path: path of the operand, in the config of its contraction.
        tensor: config of the operand.
        prefix: path of the contraction, with a dot.
    """
    if tensor.is_integer:
        return
    if tensor.is_quantized and not tensor.use_fake_quant:
        problem = f"has the grid {tensor.numerics!r}, whose values are no integers"
        remedy = f"set {path}.numerics to a grid of integers"
    elif tensor.is_quantized:
        problem, remedy = "has use_fake_quant=True", f"set {path}.use_fake_quant=False"
    else:
        problem, remedy = "is not quantized", f"set {path}.numerics"
    raise ValueError(
        f"{prefix}dg_accumulator_dtype='int32' needs two integer operands, but {path} "
        f"{problem}; {remedy}, or leave {prefix}dg_accumulator_dtype None"
    )


def check_in_dtype(in_dtype: np.dtype | None, path: str, tensor: Tensor) -> None:
    """Raises ValueError if a float dtype does not hold the integers of an operand."""
    # A reused operand is on the forward's grid, not on this tensor's.
    if in_dtype is None or not tensor.is_integer or tensor.use_fwd_quant:
        return
    grid = tensor.grid
    if 2.0 ** (jnp.finfo(in_dtype).nmant + 1) < grid.largest_stored:
        raise ValueError(
            f"dg_in_dtype={in_dtype.name!r} does not hold the "
            f"{grid.storage_dtype.name} integers of {path} exactly; use 'bfloat16' or "
            "wider, or a grid of fewer bits"
        )


def misplaced_use_fwd_quant(path: str) -> str:
    """Returns the message for an operand that cannot reuse the forward's integers."""
    return (
        f"{path}.use_fwd_quant=True: only dlhs.rhs and drhs.rhs can reuse what the "
        f"forward quantized; set {path}.use_fwd_quant=False"
    )


def check_no_moving_scale(path: str, tensor: Tensor) -> None:
    """Raises ValueError if a tensor that is no operand of `fwd` has a moving scale."""
    if tensor.scale_moves:
        raise ValueError(
            f"{path}.calib_shared_axes='remaining': only fwd.lhs or fwd.rhs can have "
            "scales that multiply the other operand; gradients take them as they are "
            f"there. Leave {path}.calib_shared_axes None"
        )


def check_backward_calibration(path: str, tensor: Tensor) -> None:
    """Raises ValueError if a gradient's operand cannot have its calibration."""
    calibration, is_gradient = tensor.calibration, path.endswith(".lhs")
    if calibration.has_state and not is_gradient:
        raise ValueError(
            f"{path}.calibration={calibration!r} gathers statistics, which only "
            "fwd.lhs, fwd.rhs, dlhs.lhs and drhs.lhs can; use a calibration that looks "
            "at the array alone, such as calibration.AbsMax()"
        )
    if calibration.is_learned:
        raise ValueError(
            f"{path}.calibration={calibration!r} is learned, which only those of "
            "fwd.lhs and fwd.rhs can be; use one that looks at the array alone, such "
            "as calibration.AbsMax()"
        )
    if tensor.gathers_statistics and tensor.calib_shared_axes != "per_tensor":
        raise ValueError(
            f"{path}.calibration={calibration!r} gathers statistics of the output "
            f"gradient, but {path}.calib_shared_axes is {tensor.calib_shared_axes!r}: "
            "each row of a batch would have its own. Set it to 'per_tensor'"
        )


def check_dtypes(raw: "DotGeneralRaw") -> None:
    """Raises ValueError for dtypes of a contraction that do not fit its operands."""
    in_dtype, accumulator = raw.dg_in_dtype, raw.dg_accumulator_dtype
    if in_dtype is not None and not jnp.issubdtype(in_dtype, jnp.floating):
        raise ValueError(
            f"dg_in_dtype={in_dtype.name!r} is not a floating dtype; for a "
            "contraction of the stored integers leave it None"
        )
    for side in ("lhs", "rhs"):
        check_in_dtype(in_dtype, side, getattr(raw, side))
    if accumulator is None:
        return
    if jnp.issubdtype(accumulator, jnp.floating):
        if float(jnp.finfo(accumulator).max) < 1e38:
            raise ValueError(
                f"dg_accumulator_dtype={accumulator.name!r} overflows with a few "
                "products; use 'float32', or None (automatic)"
            )
        return
    if accumulator != np.dtype("int32"):
        raise ValueError(
            f"dg_accumulator_dtype={accumulator.name!r} is not available; use "
            "'int32', a floating dtype, or None (automatic)"
        )
    if in_dtype is not None:
        raise ValueError(
            "dg_accumulator_dtype='int32' needs integer operands, but "
            f"dg_in_dtype={in_dtype.name!r} casts them to floating point; leave "
            "one of the two None"
        )
    check_int32_accumulator("lhs", raw.lhs)
    if not raw.rhs.use_fwd_quant:  # Else it depends on fwd: see DotGeneral.
        check_int32_accumulator("rhs", raw.rhs)


def check_local_aqt(raw: "DotGeneralRaw") -> None:
    """Raises ValueError for tiles that contradict the operands' own granularity."""
    if raw.local_aqt is None:
        return
    for side in ("lhs", "rhs"):
        for name in ("calib_shared_axes", "blocks"):
            if (value := getattr(getattr(raw, side), name)) is not None:
                raise ValueError(
                    f"local_aqt and {side}.{name}={value!r} both say which axes "
                    f"share a scale; leave {side}.{name} or local_aqt None"
                )
        if getattr(raw, side).noise_shared_axes is not None:
            raise ValueError(
                f"{side}.noise_shared_axes: noise that axes share is not available "
                "together with local_aqt, whose tiles are axes of their own; leave "
                "one of the two None"
            )
    # A reused operand keeps the forward's scale.
    is_rhs_quantized = raw.rhs.is_quantized and not raw.rhs.use_fwd_quant
    if not (raw.lhs.is_quantized or is_rhs_quantized):
        raise ValueError(
            "local_aqt would have no effect, because neither lhs nor rhs is "
            "quantized here; set lhs.numerics, or rhs.numerics without "
            "rhs.use_fwd_quant, or leave local_aqt None"
        )
