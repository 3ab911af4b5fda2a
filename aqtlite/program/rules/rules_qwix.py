"""Converts rules of Qwix to fields of `Rule`."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np
from absl import logging

from aqtlite import config, numerics
from aqtlite.jaxpr import registry
from aqtlite.program.rules import qwix_tensors
from aqtlite.program.rules.qwix_tensors import Asked, MxScales, no_equivalent

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
    "rank": None,
    "alpha": None,
    "dropout": 0.0,
    "lora_a_initializer": None,
    "lora_b_initializer": None,
}
"""The fields of rules of Qwix, with their defaults."""

_PRODUCTS = {"dot_general", "einsum"}
_OPS = _PRODUCTS | {"conv_general_dilated", "ragged_dot"}
"""Operations of Qwix; all but einsum are also operations of `Rule.op`."""

_IS_EINSUM, _IS_NONE = "(?=.*->).*", "(?!.*->).*"
"""Paths with, and without, the equation of an einsum."""

_CONTRIB = "qwix.contrib"
_METHODS = {
    "AwqRule": "scale channels by fwd.smoothing: config.Smoothing",
    "GptqRule": "round weights by GPTQ with config.gptq()",
    "QepRule": "round weights by GPTQ with config.gptq(), which propagates no errors",
    "SqRule": "smooth activations with config.smoothquant(alpha)",
}
"""What does the work of rules whose class says what is done."""

_NOISES = ("uniform", "low_bit_uniform")

_NAMES = {
    "lhs_qtype": "act_qtype",
    "lhs_calibration_method": "act_calibration_method",
    "rhs_qtype": "weight_qtype",
    "rhs_calibration_method": "weight_calibration_method",
    "dlhs_grad_qtype": "bwd_qtype",
    "dlhs_grad_calibration_method": "bwd_calibration_method",
    "dlhs_stochastic_rounding_noise_fn": "bwd_stochastic_rounding",
    "drhs_grad_qtype": "bwd_qtype",
    "drhs_grad_calibration_method": "bwd_calibration_method",
    "drhs_stochastic_rounding_noise_fn": "bwd_stochastic_rounding",
    "drhs_tile_size": "bwd_weight_grad_tile_size",
}
"""For fields of a contraction, those of the rule that give them."""


def read(rule: Any, root: str, mx_scales: MxScales) -> list[dict[str, Any]]:
    """Returns the fields of the rules equivalent to one of Qwix.

    Args:
        rule: an object with the attributes of `qwix.QuantizationRule` or a class
            derived from it, or a mapping of them.
        root: as in `rules.from_qwix`.
        mx_scales: as in `rules.from_qwix`.

    Raises:
        TypeError: if it is neither.
        ValueError: if a field has no equivalent.
    """
    fields = {**_DEFAULTS, **_fields(rule)}
    # The name of the class comes first in paths of Linen.
    of_root = rf"(?={re.escape(root)}(?:/|$|#))" if root else ""
    module = None if fields["module_path"] == ".*" else fields["module_path"]
    return [
        {"path": of_root + path, "module": module, "op": op, **one}
        for path, op, additional in _operations(fields)
        for one in _configs(fields, additional, mx_scales)
    ]


def _configs(
    fields: Mapping[str, Any], additional: Mapping[str, Any], mx_scales: MxScales
) -> list[dict[str, Any]]:
    """Returns configs with the operands that they are for."""
    adapter = _adapter(fields)
    if fields["weight_qtype"] is None and adapter is None:
        return [{"cfg": None}]
    if fields["weight_qtype"] is None:
        return [
            {"operands": "weight", "cfg": None, "adapter": adapter},
            {"operands": "activations", "cfg": None},
        ]
    _check_static(fields)
    weights = _Reader(fields, additional, mx_scales, has_weight=True)
    activations = _Reader(fields, additional, mx_scales, has_weight=False)
    return [
        {"operands": "weight", "cfg": weights.of_weight(), "adapter": adapter},
        {"operands": "activations", "cfg": activations.of_activations()},
    ]


def _adapter(fields: Mapping[str, Any]) -> config.Lora | None:
    """Returns the adapter of a `qwix.LoraRule`; None for another rule."""
    if fields["rank"] is None:
        if fields["alpha"] is not None:
            remedy = f"a LoraRule has a rank; of an SqRule, {_METHODS['SqRule']}"
            raise no_equivalent("alpha", fields["alpha"], remedy)
        return None
    if fields["alpha"] is None:
        raise ValueError("from_qwix: a rule with a rank needs an alpha, in Qwix, too")
    if fields["lora_a_initializer"] is not None:
        raise no_equivalent(
            "lora_a_initializer",
            fields["lora_a_initializer"],
            "A starts as in PEFT; leave it out, and write values afterwards",
        )
    start = fields["lora_b_initializer"]
    if start is not None and np.any(start(jax.random.key(0), (2, 2), np.float32)):
        raise no_equivalent(
            "lora_b_initializer", start, "B starts at zero; write values afterwards"
        )
    return config.Lora(fields["rank"], fields["alpha"], fields["dropout"])


def _fields(rule: Any) -> dict[str, Any]:
    """Returns the fields that a Qwix rule has, by name."""
    if isinstance(rule, Mapping):
        given = dict(rule)
    elif dataclasses.is_dataclass(rule) and not isinstance(rule, type):
        _check_class(type(rule))
        given = {
            f.name: getattr(rule, f.name)
            for f in dataclasses.fields(rule)
            if f.name != "lora_a_initializer" or getattr(rule, f.name) is not f.default
        }
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
    # Fields that later versions of Qwix add are None by default.
    given = {k: x for k, x in given.items() if k in _DEFAULTS or x is not None}
    for name, value in given.items():
        if name not in _DEFAULTS:
            remedy = "leave it out, and name what it concerns by rules of its own"
            if name == "sparsity_rule":
                remedy = "leave it out, and set fwd.rhs.sparsity to config.NofM(n, m)"
            raise no_equivalent(name, value, remedy)
    return given


def _check_class(of_rule: type) -> None:
    """Raises ValueError for a class that asks for more than its fields say."""
    for one in of_rule.__mro__:
        if one.__module__.startswith(_CONTRIB):
            remedy = _METHODS.get(one.__name__, "config.update changes what it returns")
            raise ValueError(
                f"from_qwix: rules do not say what a {one.__name__} of {_CONTRIB} asks "
                f"for: give a qwix.QuantizationRule, and {remedy}"
            )


def _registered() -> set[str]:
    """Returns what rules of Qwix may name: all but lookups, which have no Qwix name."""
    return {*registry.names()} - {registry.LOOKUP}


def _operations(fields: Mapping[str, Any]) -> list[tuple[str, Any, Mapping[str, Any]]]:
    """Returns `Rule.path`, `Rule.op` and the fields of contractions that are given."""
    given = fields["op_names"]
    names = {given} if isinstance(given, str) else set(given)
    if unknown := names - _OPS - _registered():
        raise no_equivalent(
            "op_names",
            tuple(sorted(unknown)),
            f"name some of {', '.join(sorted(_OPS))}, or a kernel that is registered "
            "before (aqtlite.register_operation)",
        )
    # In Qwix they concern neither convolutions nor ragged_dot.
    additional = fields["additional_qt_config"] or {}
    if not isinstance(additional, Mapping):
        raise no_equivalent("additional_qt_config", additional, "write a mapping")
    if not names and not additional:
        return [(".*", None, {})]
    names = names or _PRODUCTS | _registered()
    products, others = names & _PRODUCTS, tuple(sorted(names - _PRODUCTS))
    if products == _PRODUCTS and not additional:
        return [(".*", ("dot_general", *others), {})]
    # Both are dot_generals; the path of an einsum contains its equation.
    path = _IS_EINSUM if "einsum" in products else _IS_NONE
    path = ".*" if products == _PRODUCTS else path
    found: list[tuple[str, Any, Mapping[str, Any]]] = []
    if products:
        found.append((path, "dot_general", additional))
    if others:
        found.append((".*", others, {}))
    return found


def _check_static(fields: Mapping[str, Any]) -> None:
    if fields["act_static_scale"] is not None and fields["act_qtype"] is None:
        raise no_equivalent(
            "act_static_scale",
            fields["act_static_scale"],
            "it needs an act_qtype, in Qwix, too",
        )
    if fields["act_static_scale"] and not fields["disable_channelwise_axes"]:
        raise no_equivalent(
            "act_static_scale",
            True,
            "Qwix has a static scale for each position here, and aqtlite one per "
            "tensor: read the rule without it, and set fwd.lhs.calibration to "
            "calibration.MeanOverBatches() and fwd.lhs.calib_shared_axes to "
            "'per_tensor' with config.update, as config.static_int8 does",
        )


class _Reader:
    """Builds a config of a contraction from the fields that Qwix makes for it."""

    def __init__(
        self,
        fields: Mapping[str, Any],
        additional: Mapping[str, Any],
        mx_scales: MxScales,
        *,
        has_weight: bool,
    ):
        self._given, self._mx_scales = additional, mx_scales
        self._fields = _of_contraction(fields, has_weight)
        for name, value in additional.items():
            if name not in self._fields:
                self._refuse(name, value, "leave it out, and use config.update")
        self._fields = {**self._fields, **additional}
        self._lhs, self._rhs = self._forward("lhs"), self._forward("rhs")
        if fields["act_static_scale"]:
            self._lhs = qwix_tensors.static(self._lhs)
            if not has_weight:
                self._rhs = qwix_tensors.static(self._rhs)

    def of_weight(self) -> config.DotGeneral:
        """Returns the config."""
        rhs = dataclasses.replace(self._rhs, sparsity=self._sparsity())
        return config.DotGeneral(
            fwd=config.DotGeneralRaw(lhs=self._lhs, rhs=rhs),
            dlhs=self._backward("dlhs", self._rhs),
            drhs=self._backward("drhs", self._lhs),
        )

    def of_activations(self) -> config.DotGeneral | None:
        """Returns the config for two activations; None to keep them in float."""
        if self._lhs != self._rhs:
            logging.warning(
                "from_qwix: additional_qt_config has other fields for rhs than for "
                "lhs: two activations are both quantized as lhs"
            )
        if not self._lhs.is_quantized:
            return None
        return config.DotGeneral(
            fwd=config.DotGeneralRaw(lhs=self._lhs, rhs=self._lhs),
            dlhs=self._backward("dlhs", self._lhs),
            drhs=self._backward("drhs", self._lhs),
        )

    def _forward(self, side: str) -> config.Tensor:
        if self._fields[f"{side}_collect_quant_stat"] is not None:
            name = f"{side}_collect_quant_stat"
            self._refuse(name, self._fields[name], "use act_static_scale")
        return self._tensor(side, "tile_size", side)

    def _tensor(self, prefix: str, tile_size: str, side: str) -> config.Tensor:
        qtype, method = f"{prefix}_qtype", f"{prefix}_calibration_method"
        clips = prefix != side or not self._fields["disable_gradient_clipping"]
        asked = Asked(
            self._fields[qtype],
            self._fields[method],
            self._fields[tile_size],
            self._fields[f"{prefix}_disable_channelwise_axes"],
            clips,
            (self._name(qtype), self._name(method), self._name(tile_size)),
        )
        return qwix_tensors.tensor_of(asked, self._mx_scales)

    def _backward(
        self, side: Literal["dlhs", "drhs"], forward: config.Tensor
    ) -> config.DotGeneralRaw:
        """Returns the config of a gradient, given that of the operand in it."""
        tile_size = f"{side}_tile_size"
        gradient = self._tensor(f"{side}_grad", tile_size, "")
        is_original = self._fields["use_original_residuals"]
        if is_original or not forward.is_quantized or forward.blocks:
            residual = self._tensor(f"{side}_residual", tile_size, "")
        else:
            residual = config.Tensor(use_fwd_quant=True)
        return config.DotGeneralRaw(lhs=self._noisy(side, gradient), rhs=residual)

    def _noisy(self, side: str, tensor: config.Tensor) -> config.Tensor:
        name = f"{side}_stochastic_rounding_noise_fn"
        noise, grid = self._fields[name], tensor.numerics
        if noise is None:
            return tensor
        # In additional_qt_config, a function of Qwix that says its method.
        if getattr(noise, "method", noise) not in _NOISES:
            self._refuse(name, noise, f"write {' or '.join(map(repr, _NOISES))}")
        if not isinstance(grid, numerics.IntSymmetric):
            return tensor  # Qwix rounds other grids to nearest.
        noisy = dataclasses.replace(
            grid, preserve_max_val=True, stochastic_rounding=True
        )
        return dataclasses.replace(tensor, numerics=noisy)

    def _sparsity(self) -> config.NofM | None:
        rule = self._fields["sparsity_rule"]
        if rule is None:
            return None
        n, m = rule.weight_sparsity_n, rule.weight_sparsity_m
        others = rule.weight_sparsity_block_size, rule.weight_sparsity_offset
        if rule.weight_sparsity_order != "C" or any(others):
            self._refuse(
                "sparsity_rule",
                rule,
                "groups lie along the contracting axis here, which is order='C' "
                "without block_size and offset; or leave it out, and set "
                "fwd.rhs.sparsity to config.NofM(n, m)",
            )
        return config.NofM(n, m, decay=0.0) if m else None

    def _name(self, name: str) -> str:
        if name in self._given:
            return f"additional_qt_config[{name!r}]"
        return _NAMES.get(name, name)

    def _refuse(self, name: str, value: Any, remedy: str) -> None:
        raise no_equivalent(self._name(name), value, remedy)


_SIDES = ("lhs", "rhs")


def _of_contraction(fields: Mapping[str, Any], has_weight: bool) -> dict[str, Any]:
    """Returns the fields of Qwix's `DotGeneralQtConfig` that its provider makes."""
    rhs = "weight" if has_weight else "act"
    made: dict[str, Any] = {
        "lhs_qtype": fields["act_qtype"],
        "rhs_qtype": fields[f"{rhs}_qtype"],
        "tile_size": fields["tile_size"],
        "lhs_calibration_method": fields["act_calibration_method"],
        "rhs_calibration_method": fields[f"{rhs}_calibration_method"],
        "disable_gradient_clipping": False,
        "use_original_residuals": fields["bwd_qtype"] is None,
        "sparsity_rule": None,
    }
    for side in _SIDES:
        is_per_tensor = fields["disable_channelwise_axes"]
        made |= {
            f"{side}_collect_quant_stat": None,
            f"{side}_disable_channelwise_axes": is_per_tensor,
            f"d{side}_grad_qtype": fields["bwd_qtype"],
            f"d{side}_grad_calibration_method": fields["bwd_calibration_method"],
            f"d{side}_grad_disable_channelwise_axes": is_per_tensor,
            f"d{side}_tile_size": None,
            f"d{side}_stochastic_rounding_noise_fn": fields["bwd_stochastic_rounding"],
            f"d{side}_residual_qtype": None,
            f"d{side}_residual_calibration_method": "absmax",
            f"d{side}_residual_disable_channelwise_axes": False,
        }
    if fields["bwd_qtype"] is None:
        made["dlhs_stochastic_rounding_noise_fn"] = None
        made["drhs_stochastic_rounding_noise_fn"] = None
    elif has_weight:
        made["drhs_tile_size"] = fields["bwd_weight_grad_tile_size"]
    return made
