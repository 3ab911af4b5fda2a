"""Converts rules of Qwix to fields of `Rule`."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from aqtlite import calibration, config, numerics
from aqtlite.jaxpr import registry

_DEFAULTS: dict[str, Any] = {
    "module_path": ".*",
    "op_names": (),
    "weight_qtype": None,
    "act_qtype": None,
    "tile_size": None,
    "act_static_scale": None,
    "weight_calibration_method": "absmax",
    "act_calibration_method": None,
    "act_batch_axes": (0,),
    "bwd_qtype": None,
    "bwd_calibration_method": "absmax",
    "bwd_weight_grad_tile_size": None,
    "disable_channelwise_axes": False,
    "bwd_stochastic_rounding": None,
    "channelwise_noise_axes": (0,),
    "additional_qt_config": None,
}
"""The fields of rules of Qwix 0.1, with their defaults."""

_OPS = {"dot_general", "einsum", "conv_general_dilated", "ragged_dot"}
"""Operations of Qwix; all but einsum are also operations of `Rule.op`."""

_IS_EINSUM, _IS_NONE = "(?=.*->).*", "(?!.*->).*"
"""Paths with, and without, the equation of an einsum."""

_MX = {"mxfp8": "float8_e4m3fn", "mxfp4": "float4_e2m1fn"}
"""Element dtypes of the formats with power-of-two scales."""

_GIVEN = (calibration.Constant, calibration.ConstantRange)
"""Calibrations with fixed ranges, which read no array."""


def read(rule: Any, root: str) -> list[dict[str, Any]]:
    """Returns the fields of the rules equivalent to one of Qwix.

    Args:
        rule: an object with the attributes of `qwix.QuantizationRule` or a class
            derived from it, or a mapping of them.
        root: as in `rules.from_qwix`.

    Raises:
        TypeError: if it is neither.
        ValueError: if a field has no equivalent.
    """
    fields = {**_DEFAULTS, **_fields(rule)}
    # The name of the class comes first in paths of Linen.
    of_root = rf"(?={re.escape(root)}(?:/|$|#))" if root else ""
    if fields["weight_qtype"] is None:
        made: list[dict[str, Any]] = [{"cfg": None}]
    else:
        reader = _Reader(fields)
        made = [
            {"operands": "weight", "cfg": reader.of_weight()},
            {"operands": "activations", "cfg": reader.of_activations()},
        ]
    module = None if fields["module_path"] == ".*" else fields["module_path"]
    return [
        {"path": of_root + path, "module": module, "op": op, **one}
        for path, op in _operations(fields["op_names"])
        for one in made
    ]


def _fields(rule: Any) -> dict[str, Any]:
    """Returns the fields that a Qwix rule has, by name."""
    if isinstance(rule, Mapping):
        given = dict(rule)
    elif dataclasses.is_dataclass(rule) and not isinstance(rule, type):
        given = {f.name: getattr(rule, f.name) for f in dataclasses.fields(rule)}
    else:
        raise TypeError(
            "from_qwix takes rules of Qwix, such as qwix.QuantizationRule(...), or "
            f"mappings of their fields, got {rule!r}"
        )
    if "module_path" not in given and not isinstance(rule, Mapping):
        raise TypeError(
            "from_qwix takes rules of Qwix, such as qwix.QuantizationRule(...), got "
            f"{rule!r}, which has no module_path"
        )
    for name, value in given.items():
        if name not in _DEFAULTS:
            raise _no_equivalent(
                name,
                value,
                "leave it out, and name what it concerns by rules of its own",
            )
    return given


def _operations(names: Any) -> list[tuple[str, Any]]:
    """Returns pairs of `Rule.path` and `Rule.op`."""
    names = {names} if isinstance(names, str) else set(names)
    if unknown := names - _OPS - {*registry.names()}:
        raise _no_equivalent(
            "op_names",
            tuple(sorted(unknown)),
            f"name some of {', '.join(sorted(_OPS))}, or a kernel that is registered "
            "before (aqtlite.register_operation)",
        )
    if not names:
        return [(".*", None)]
    products = names & {"dot_general", "einsum"}
    others = tuple(sorted(names - products))
    if len(products) == 2:
        return [(".*", ("dot_general", *others))]
    # Both are dot_generals; the path of an einsum contains its equation.
    path = _IS_EINSUM if "einsum" in products else _IS_NONE
    of_products = [(path, "dot_general")] if products else []
    return [*of_products, *([(".*", others)] if others else [])]


class _Reader:
    """Builds configs from the fields of a Qwix rule."""

    def __init__(self, fields: Mapping[str, Any]):
        self._fields = fields
        self._check()
        self._is_per_tensor: bool = fields["disable_channelwise_axes"]
        self._act = self._forward("act_qtype", "act_calibration_method")
        self._weight = self._forward("weight_qtype", "weight_calibration_method")
        if fields["act_static_scale"]:
            self._act = self._static(self._act)

    def _check(self) -> None:
        fields = self._fields
        others = fields["additional_qt_config"] or {}
        if any(value is not None for value in others.values()):
            raise _no_equivalent(
                "additional_qt_config",
                fields["additional_qt_config"],
                "leave it out, and change the rules' configs with config.update",
            )
        if fields["act_static_scale"] is not None and fields["act_qtype"] is None:
            raise _no_equivalent(
                "act_static_scale",
                fields["act_static_scale"],
                "it needs an act_qtype, in Qwix, too",
            )
        if fields["act_static_scale"] and not fields["disable_channelwise_axes"]:
            raise _no_equivalent(
                "act_static_scale",
                True,
                "Qwix has a static scale for each position here, and aqtlite one per "
                "tensor: read the rule without it, and set fwd.lhs.calibration to "
                "calibration.MeanOverBatches() and fwd.lhs.calib_shared_axes to "
                "'per_tensor' with config.update, as config.static_int8 does",
            )
        if fields["tile_size"] and fields["disable_channelwise_axes"]:
            raise _no_equivalent(
                "disable_channelwise_axes",
                True,
                "tile_size has a scale for each row of a tile: leave one of them out",
            )

    def of_weight(self) -> config.DotGeneral:
        """Returns the config for an activation and a weight."""
        return self._dot_general(
            self._act, self._weight, self._fields["bwd_weight_grad_tile_size"]
        )

    def of_activations(self) -> config.DotGeneral | None:
        """Returns the config for two activations; None to keep them in float."""
        if self._fields["act_qtype"] is None:
            return None
        return self._dot_general(self._act, self._act, None)

    def _dot_general(
        self, lhs: config.Tensor, rhs: config.Tensor, tile_size: Any
    ) -> config.DotGeneral:
        forward = config.DotGeneralRaw(lhs=lhs, rhs=rhs)
        if self._fields["bwd_qtype"] is None:
            # Without bwd_qtype, gradients are contracted in float.
            return config.DotGeneral(fwd=forward)
        blocks = _blocks("bwd_weight_grad_tile_size", tile_size)
        return config.DotGeneral(
            fwd=forward,
            dlhs=config.DotGeneralRaw(lhs=self._gradient(None), rhs=_reused(rhs)),
            drhs=config.DotGeneralRaw(lhs=self._gradient(blocks), rhs=_reused(lhs)),
        )

    def _forward(self, qtype: str, method: str) -> config.Tensor:
        blocks = _blocks("tile_size", self._fields["tile_size"])
        return self._tensor(qtype, method, blocks)

    def _gradient(self, blocks: config.Blocks | None) -> config.Tensor:
        tensor = self._tensor("bwd_qtype", "bwd_calibration_method", blocks)
        noise, grid = self._fields["bwd_stochastic_rounding"], tensor.numerics
        if noise is None:
            return tensor
        if noise != "uniform":
            raise _no_equivalent(
                "bwd_stochastic_rounding", noise, "aqtlite rounds with 'uniform' noise"
            )
        if not isinstance(grid, numerics.IntSymmetric):
            return tensor  # Qwix rounds other grids to nearest.
        noisy = dataclasses.replace(
            grid, preserve_max_val=True, stochastic_rounding=True
        )
        return dataclasses.replace(tensor, numerics=noisy)

    def _static(self, tensor: config.Tensor) -> config.Tensor:
        if isinstance(tensor.calibration, _GIVEN):
            return tensor
        mean = calibration.MeanOverBatches(of=tensor.calibration)
        return dataclasses.replace(tensor, calibration=mean)

    def _tensor(
        self, qtype: str, method: str, blocks: config.Blocks | None
    ) -> config.Tensor:
        if self._fields[qtype] is None:
            return config.Tensor()
        text = self._fields[method] or "absmax"
        name, numbers = _parsed(method, text)
        grid = _grid(qtype, self._fields[qtype])
        is_fixed = name == "fixed"
        made: dict[str, Any] = {"numerics": grid}
        if is_fixed or self._is_per_tensor:
            made["calib_shared_axes"] = "per_tensor"
        if not is_fixed:
            made["blocks"] = blocks
        if self._fields[qtype] in _MX:
            if blocks != config.Blocks(size=32):
                raise _no_equivalent(
                    qtype, self._fields[qtype], "its tile_size is 32, in Qwix, too"
                )
            made["po2_scale"] = True
        match name, numbers:
            case "absmax", []:
                return config.Tensor(**made)
            case "absmax", [scale]:
                made["calibration"] = calibration.AbsMax(clipping_scale=scale)
                clips = scale < 1
            case "rms", [factor]:
                made["calibration"], clips = calibration.RMS(factor), True
            case "fixed", ([_] | [_, _]) as bounds:
                low, high = (-bounds[0], bounds[0]) if len(bounds) == 1 else bounds
                if low == -high:
                    made["calibration"] = calibration.Constant(high)
                else:
                    made["calibration"] = calibration.ConstantRange(min=low, max=high)
                    made["numerics"] = _with_zero_point(method, text, grid)
                clips = True
            case "minmax", []:
                made["calibration"], clips = calibration.MinMax(), False
                made["numerics"] = _with_zero_point(method, text, grid)
            case _:
                raise _no_equivalent(
                    method,
                    text,
                    "write absmax, absmax,<scale>, minmax, rms,<factor>, fixed,<bound> "
                    "or fixed,<min>,<max>; aqtlite.calibration has others, for the "
                    "rules that this returns",
                )
        if clips:
            made["numerics"] = dataclasses.replace(made["numerics"], clip_gradient=True)
        return config.Tensor(**made)


def _reused(forward: config.Tensor) -> config.Tensor:
    """Returns the operand of a gradient: reuses forward quantization without blocks."""
    return config.Tensor(use_fwd_quant=forward.is_quantized and not forward.blocks)


def _grid(name: str, qtype: Any) -> Any:
    """Returns the grid of a qtype."""
    if qtype == "nf4":
        return numerics.NormalFloat()
    dtype = _MX.get(qtype, qtype) if isinstance(qtype, str) else jnp.dtype(qtype).name
    if match := re.fullmatch("int([2-8])", dtype):
        return numerics.IntSymmetric(bits=int(match[1]))
    if re.fullmatch("float[48]_.*", dtype):
        return numerics.Float.from_dtype(dtype)
    remedy = "name one of int2 to int8, a float8 or float4 dtype, nf4, mxfp8 or mxfp4"
    if dtype == "nvfp4":
        remedy = "its scales have no second level in Qwix: config.nvfp4() is the format"
    raise _no_equivalent(name, qtype, remedy)


def _with_zero_point(name: str, text: str, grid: Any) -> numerics.IntAffine:
    if not isinstance(grid, numerics.IntSymmetric) or grid.bits not in (4, 8):
        raise _no_equivalent(
            name, text, "a zero point needs int8 or int4, in Qwix, too"
        )
    return numerics.IntAffine(bits=grid.bits, signed=True)


def _blocks(name: str, size: Any) -> config.Blocks | None:
    """Returns the blocks of a tile size: a block size, or 1 / number of blocks."""
    if not size:
        return None
    if isinstance(size, int):
        return config.Blocks(size=size)
    count = round(1 / size)
    if abs(count * size - 1) > 1e-6:
        raise _no_equivalent(name, size, "write an int, or 1 / <number of tiles>")
    return config.Blocks(count=count)


def _parsed(name: str, text: Any) -> tuple[str, list[float]]:
    """Splits a calibration method into its name and numbers."""
    method, *numbers = str(text).lower().split(",")
    try:
        return method, [float(number) for number in numbers]
    except ValueError as error:
        raise _no_equivalent(name, text, "write numbers behind the commas") from error


def _no_equivalent(name: str, value: Any, remedy: str) -> ValueError:
    return ValueError(f"from_qwix: {name}={value!r} has no equivalent: {remedy}")
