"""Ways to quantize a network, as the documentation has them: a line each."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

import aqtlite
from aqtlite import Rule, config, numerics
from benchmarks.pretrained.tasks.task import Arrays

Function = Callable[..., Any]
Rules = Sequence[Rule]
Chooser = Callable[[Function, Any, Sequence[Arrays]], Rules]
"""Function of a network, its parameters and a few inputs."""


@dataclasses.dataclass(frozen=True)
class Route:
    """A way to quantize a network."""

    name: str
    choose: Chooser
    """Returns the rules. Most are the same for every network."""
    identity: str
    """What decides about the rules, beside the network and its data."""


def _fixed(name: str, cfg: config.DotGeneral, **where: Any) -> Route:
    rules = (Rule(cfg=cfg, **where),)
    return Route(name, lambda *_: rules, repr(rules))


def _weights(bits: int, size: int | None = None) -> config.DotGeneral:
    """The config of weights alone, with blocks of inputs if a size is given."""
    cfg = config.weight_only(bits)
    if size is None:
        return cfg
    return config.update(cfg, {"fwd.rhs.blocks": config.Blocks(size=size, fit=True)})


CANDIDATES = {
    "2 bits, blocks of 16": _weights(2, 16),
    "4 bits": _weights(4),
    "4 bits, blocks of 32": _weights(4, 32),
    "4 bits, blocks of 16": _weights(4, 16),
    "8 bits": _weights(8),
}
"""What `aqtlite.choose_bits` chooses from."""

UNIFORM = "4 bits, blocks of 32"
"""The candidate that gives the budget."""

IN_FLOAT = 0.08
"""The part of a network's contractions that stays in float, of those that lose most."""

SMALL = 4096
"""Weights of a kernel that is not small. Those of the first and of depthwise
convolutions are."""

GPTQ_OF_LARGE = f"GPTQ, 4 bits, blocks of 32; 8 bits for less than {SMALL:,} weights"

_EIGHT = Rule(cfg=_weights(8), operands="weight")


def blame(
    network: Function, parameters: Any, sample: Sequence[Arrays]
) -> list[tuple[str, float]]:
    """The contractions and the decibels of the output with each alone in int8.

    Those that lose most are first.
    """
    found = aqtlite.sensitivity(
        network,
        parameters,
        sample,
        candidates={"int8": config.qat(8)},
    )
    losses = [(one.path, one.output_snr) for one in found.contractions]
    return sorted(losses, key=lambda one: one[1])


def _worst_in_float(
    network: Function, parameters: Any, sample: Sequence[Arrays]
) -> Rules:
    losses = blame(network, parameters, sample)
    count = max(1, round(IN_FLOAT * len(losses)))
    paths = "|".join(re.escape(path) for path, _ in losses[:count])
    return (Rule(path=paths, cfg=None), Rule(cfg=config.qat(8)))


def _small_in_8_bits(
    network: Function, parameters: Any, sample: Sequence[Arrays]
) -> Rules:
    plan = aqtlite.quantize_function(network, [_EIGHT], params=0).plan(
        parameters, *sample[0]
    )
    small = [
        re.escape(one.path)
        for one in plan.quantized()
        for operand in (one.lhs, one.rhs)
        if operand.kind == "weight" and math.prod(operand.shape) < SMALL
    ]
    in_8_bits = [Rule(path="|".join(small), cfg=_EIGHT.cfg)] if small else []
    return (*in_8_bits, Rule(cfg=config.gptq(4, 32), operands="weight"))


def _chosen(network: Function, parameters: Any, sample: Sequence[Arrays]) -> Rules:
    found = aqtlite.choose_bits(
        network, parameters, sample, candidates=CANDIDATES, budget=1.0
    )
    (uniform,) = (one for one in found.uniform if one.name == UNIFORM)
    measured = (*found.curve, *found.uniform)
    within = [one for one in measured if one.nbytes <= uniform.nbytes]
    return max(within, key=lambda one: one.snr).rules


ROUTES = (
    _fixed("int8", config.qat(8)),
    _fixed("static int8, max", config.static_int8("max")),
    _fixed("static int8, percentile", config.static_int8("percentile")),
    _fixed("static int8, mse", config.static_int8("mse")),
    _fixed("static int8, moving average", config.static_int8("moving_average")),
    _fixed("static int8, max, affine", config.static_int8("max", affine=True)),
    _fixed("fp8", config.fp8(per_tensor=True)),
    _fixed("mxfp8", config.mxfp8()),
    _fixed("weights of 8 bits", _weights(8), operands="weight"),
    _fixed("weights of 4 bits", _weights(4), operands="weight"),
    _fixed("weights of 4 bits, blocks of 32", _weights(4, 32), operands="weight"),
    _fixed("GPTQ, 4 bits, blocks of 32", config.gptq(4, 32), operands="weight"),
    Route(
        GPTQ_OF_LARGE,
        _small_in_8_bits,
        f"{config.gptq(4, 32)} {_weights(8)}",
    ),
    Route("int8, the worst in float", _worst_in_float, str(IN_FLOAT)),
    Route(
        "chosen bits, as many bytes as 4 bits in blocks of 32",
        _chosen,
        f"{UNIFORM} {CANDIDATES} by measured bytes",
    ),
)

NAMES = tuple(one.name for one in ROUTES)


def served(
    network: Function, parameters: Any, rules: Rules, held: Sequence[Arrays]
) -> tuple[Function, Any]:
    """Calibrates where rules have statistics, and freezes weights.

    Args:
        network: function of the parameters and the inputs.
        parameters: its parameters.
        rules: the rules.
        held: inputs for calibration.

    Returns:
        The function that is served, and its parameters.
    """
    quantized = aqtlite.quantize_function(network, rules, params=0)
    state = None
    if quantized.has_state:
        state = quantized.init_state(parameters, *held[0])
        gather = jax.jit(quantized.gather)
        for batch in held:
            state = gather(state, parameters, *batch)
    return aqtlite.convert_function(quantized, parameters, *held[0], state=state)


def nbytes(tree: Any) -> int:
    """Bytes of arrays, where values of few bits share a byte."""
    leaves = jax.tree.leaves(tree, is_leaf=_is_node)
    return sum(_nbytes(leaf) for leaf in leaves if not aqtlite.is_frozen(leaf))


def _is_node(x: Any) -> bool:
    return isinstance(x, aqtlite.QTensor) or aqtlite.is_frozen(x)


def _nbytes(leaf: Any) -> int:
    if not isinstance(leaf, aqtlite.QTensor):
        return leaf.nbytes
    grid, values = leaf.numerics, leaf.qvalue
    bits = 8 * values.dtype.itemsize
    if isinstance(grid, numerics.IntSymmetric | numerics.IntAffine):
        bits = grid.bits
    others = [x.nbytes for x in jax.tree.leaves(leaf) if x is not values]
    return -(-values.size * bits // 8) + sum(others)


def select(name: str) -> Route:
    """The route of a name."""
    return next(one for one in ROUTES if one.name == name)


def identity(name: str) -> str:
    """What decides about the rules of a route, beside the network and its data."""
    return select(name).identity
