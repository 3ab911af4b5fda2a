"""The dtypes in which programs contract on a platform, as they are lowered for it."""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from aqtlite import calibration, config
from aqtlite.lowering.forms import panel_products, processor
from aqtlite.program.plan import Plan
from aqtlite.program.planned import PlannedContraction
from aqtlite.quantization.states.statistics import States
from aqtlite.shapes.sharding import shape_of

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
"""Platforms for which contractions are lowered, on any host."""

_PRODUCT = re.compile(
    r"(?P<operation>stablehlo\.dot_general|stablehlo\.convolution|chlo\.ragged_dot"
    r"|@__op\$block_scaled_dot|@aqtlite_(?:panels|table)_\w+)\W.* :"
    r" \((?P<types>tensor<.*>)\) ->"
)
_PAIRS = re.compile(
    r"stablehlo\.bitcast_convert\W.* : \(tensor<[\dx]*xi4>\) -> tensor<[\dx]*xui8>"
)
_ELEMENT = re.compile(r"tensor<(?:[\d?]+x)*(\w+)>")
_PREFIXES = {"f": "float", "bf": "bfloat", "i": "int", "ui": "uint"}


def products(function: Callable[..., Any], *args: Any, platform: str) -> list[str]:
    """Returns the dtypes of the products in a program.

    >>> from aqtlite import config, make_dot_general
    >>> dot = make_dot_general(config.fp8())
    >>> x = jax.numpy.ones((32, 32))
    >>> products(lambda x: dot(x, x, (((1,), (0,)), ((), ()))), x, platform="tpu")
    ['float8_e4m3fn x float8_e4m3fn']

    Args:
        function: function of arrays.
        *args: its arguments, or their types.
        platform: one of `PLATFORMS`; the program is lowered for one device of it.

    Returns:
        Dtypes of lhs and rhs such as ``"int8 x int8"``, each once, in the order of the
        program. A product that takes scales of blocks has ``", block-scaled"`` after
        them. Products of integers that read int4 as bytes of two, as CPUs do for large
        weights, have ``", int4 in pairs"``, and those of the kernels of the extra
        ``cpu`` have ``", by a kernel"``: there, codes of floats are int4 where they are
        stored, and uint8, or in blocks int8, where they are computed.

    Raises:
        ValueError: if the platform is unknown.
    """
    check_platform(platform)
    with jax.disable_jit(False):
        traced = jax.jit(function).trace(*args)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    has_pairs = _PAIRS.search(text) is not None
    found = []
    for match in _PRODUCT.finditer(text):
        lhs, rhs, *_ = map(_dtype_of, _ELEMENT.findall(match["types"]))
        suffix = ", block-scaled" if "block_scaled" in match["operation"] else ""
        if has_pairs and {lhs, rhs} <= {"int8", "uint8"}:
            suffix = ", int4 in pairs"
        if match["operation"].startswith("@aqtlite_"):
            lhs, rhs, suffix = rhs, lhs, ", by a kernel"
        found.append(f"{lhs} x {rhs}{suffix}")
    return list(dict.fromkeys(found))


def check_platform(platform: str) -> None:
    """Raises ValueError for an unknown platform."""
    if platform not in PLATFORMS:
        raise ValueError(
            f"platform={platform!r} is not known; give one of {', '.join(PLATFORMS)}"
        )


def _dtype_of(element: str) -> str:
    """The name that JAX has for an element type, as float8_e4m3fn for f8E4M3FN."""
    prefix, bits, rest = re.fullmatch(r"([a-z]+)(\d+)(\w*)", element).groups()  # type: ignore[union-attr]
    suffix = f"_{rest.lower()}" if rest else ""
    return f"{_PREFIXES[prefix]}{bits}{suffix}"


def on_platform(plan: Plan, platform: str | None) -> Plan:
    """Returns a plan that says in what each contraction is contracted on a platform.

    Each distinct contraction is lowered by itself, with its gradients, for one device.

    Args:
        plan: a plan.
        platform: one of `PLATFORMS`; None returns the plan as it is.

    Raises:
        ValueError: if the platform is unknown, or if a contraction has a symbolic
            shape.
    """
    if platform is None:
        return plan
    check_platform(platform)
    known: dict[str, str] = {}
    contractions = []
    for one in plan.contractions:
        key = _key(one)
        if key not in known:
            known[key] = _contracted_in(one, platform)
        text = f"{platform}: {known[key]}"
        contractions.append(dataclasses.replace(one, contracted_in=text))
    return dataclasses.replace(plan, contractions=tuple(contractions))


def _key(one: PlannedContraction) -> str:
    """Text that contractions of equal programs share."""
    return repr((one.op, *one.site.signature, one.is_exchanged, one.cfg))


def _contracted_in(one: PlannedContraction, platform: str) -> str:
    if not one.is_quantized:
        return f"{one.lhs.dtype} x {one.rhs.dtype}"
    one.check_has_sizes(f"lower for {platform}")
    operands = one.in_order([shape_of(atom.aval) for atom in one.site.eqn.invars])
    contract = functools.partial(_contract, one, _without_states(one.cfg))
    out = jax.eval_shape(contract, *operands)
    programs: dict[str, tuple[Callable[..., Any], Sequence[Any]]] = {
        "fwd": (contract, operands),
        "dlhs": (functools.partial(_gradient, contract, 0), (out, *operands)),
        "drhs": (functools.partial(_gradient, contract, 1), (out, *operands)),
    }
    found = {
        name: " and ".join(products(function, *args, platform=platform))
        for name, (function, args) in programs.items()
    }
    if len(set(found.values())) == 1:
        text = found["fwd"]
    else:
        text = "; ".join(f"{name} {one}" for name, one in found.items())
    has_integers = "int8" in found["dlhs"] or "int8" in found["drhs"]
    if platform == "cpu" and has_integers and _is_slow_here():
        text += "; gradients in float32's time without VNNI and the extra 'cpu'"
    return text


def _is_slow_here() -> bool:
    """Whether int8 by int8 takes the time of float32 by float32 in this process."""
    return processor.has_slow_dots_of_bytes() and not panel_products.sums_bytes()


def _contract(
    one: PlannedContraction, cfg: config.DotGeneral, *operands: Any
) -> jax.Array:
    (out,) = one.contract(cfg, operands, States())
    return out


def _gradient(
    contract: Callable[..., jax.Array], index: int, cotangent: Any, *operands: Any
) -> jax.Array:
    def of_one(x: Any) -> jax.Array:
        return contract(*operands[:index], x, *operands[index + 1 :])

    gradient: jax.Array = jax.vjp(of_one, operands[index])[1](cotangent)[0]
    return gradient


def _without_states(cfg: config.DotGeneral) -> config.DotGeneral:
    """A config contracted in the same dtypes, whose ranges need no state."""
    changes: dict[str, Any] = {
        "fwd.smoothing": None,
        "fwd.rhs.rounding": None,
        "out": config.Tensor(),
    }
    for name in ("fwd", "dlhs", "drhs"):
        for side in ("lhs", "rhs"):
            tensor: config.Tensor = getattr(getattr(cfg, name), side)
            if tensor.gathers_statistics or tensor.is_learned:
                has_zero_point = tensor.grid.zero_point_range is not None
                of_array = (
                    calibration.MinMax() if has_zero_point else calibration.AbsMax()
                )
                changes[f"{name}.{side}.calibration"] = of_array
    return config.update(cfg, changes)
