"""What the scales of a contraction may see: nothing that its result does not, in float.

A scale that is found from an activation is shared along the axes that are contracted.
Where one operand is masked along them, as probabilities are for later positions, the
scale of the other one would let each result see what the mask hides. Then each
contracted element of the other operand has a scale of its own, which multiplies the
masked operand: ``sum_s p_ts (s_s v_s) = sum_s (p_ts s_s) v_s``, and what is masked
stays zero. The roles are told by the facts about the operands (`jaxpr.axes`), not
by their order, which `jnp.einsum` changes.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from aqtlite import config
from aqtlite.config import of_activations
from aqtlite.jaxpr.axes.axis_facts import Facts, Source
from aqtlite.jaxpr.sites import Site
from aqtlite.operations import SIDES, DotGeneral, OperandAxes, Side
from aqtlite.program.planned import PlannedContraction

_UNKNOWN_ROLES = (
    "one operand is masked along the axes that are contracted, and no scale of the "
    "other one sees only what the mask leaves: give a static or learned range, or "
    "calib_shared_axes"
)
_OVER_TIME = (
    "along an axis its window reads no later position, as in a convolution over time, "
    "and one scale for all positions would let earlier ones see later ones: give a "
    "static or learned range, or write it as a sum of products, one for each tap"
)
_WEIGHTS_ALONE = "its config quantizes weights alone, and both operands are activations"


class Verdict(NamedTuple):
    """The decision about the scales of a contraction."""

    moves: Side | None = None
    """Side of the equation whose scales multiply the other operand; None for none."""

    why_float: str | None = None
    """Reason why the contraction stays in float; None if it does not."""


_AS_CONFIGURED = Verdict()


def decided(
    one: PlannedContraction, cfg: config.DotGeneral
) -> tuple[PlannedContraction, config.DotGeneral]:
    """Decides how the scales of a contraction see nothing that its result does not.

    Args:
        one: a contraction that a rule quantizes.
        cfg: config of the rule.

    Returns:
        The contraction, perhaps with a reason to stay in float, and its config.
    """
    kinds = one.lhs.kind, one.rhs.kind
    if kinds == ("activation", "activation") and cfg.fwd.rhs.is_quantized:
        if not cfg.fwd.lhs.is_quantized:
            why = _WEIGHTS_ALONE
            return dataclasses.replace(one, why_float=why, is_left_alone=True), cfg
        cfg = config.for_activations(cfg)
    # Floats beside integers are contracted as digits, which share scales, too.
    is_of_digits = not cfg.fwd.lhs.is_quantized and cfg.fwd.rhs.is_integer
    is_shared = is_of_digits or of_activations.is_dynamic(cfg.fwd.lhs)
    if "activation" not in kinds or not is_shared:
        return one, cfg
    verdict = Verdict()
    if one.op == "conv_general_dilated":
        verdict = _of_conv(one.site)
    elif one.op == "dot_general":
        verdict = _of_dot(one.site, kinds)
    if verdict.why_float is not None and is_of_digits:
        return one, config.update(cfg, {"fwd.rhs.use_fake_quant": True})
    if verdict.moves is not None:
        cfg = config.for_values(cfg, verdict.moves)
    return dataclasses.replace(one, why_float=verdict.why_float), cfg


def _of_dot(site: Site, kinds: Sequence[str]) -> Verdict:
    """Decides about a `dot_general` with an activation whose scale is dynamic.

    Args:
        site: the contraction.
        kinds: "weight", "constant" or "activation", of lhs and rhs.
    """
    shapes = (atom.aval.shape for atom in site.eqn.invars[:2])
    operation = DotGeneral.of(site.eqn.params["dimension_numbers"], *shapes)
    lhs, rhs = (
        _Operand(side, origin.facts, operation.axes(side), kind)
        for side, origin, kind in zip(SIDES, site.operands, kinds, strict=True)
    )
    found = [_giver(lhs, rhs), _giver(rhs, lhs)]
    wanted = [one for one in found if one is not None]
    if not wanted:
        return _AS_CONFIGURED
    best = max(wanted, key=lambda one: (one.rank, one.verdict.moves is not None))
    return best.verdict


class _Operand(NamedTuple):
    side: Side
    facts: Facts
    axes: OperandAxes
    kind: str

    def sources(self, axes: Sequence[int]) -> frozenset[Source]:
        """Axes of inputs that some axes come from."""
        return frozenset[Source]().union(*(self.facts.axes[i].sources for i in axes))

    @property
    def is_softmax(self) -> bool:
        """Whether its elements along the contracting axes are probabilities."""
        return any(map(self.facts.is_softmax, self.axes.contracting))

    @property
    def sees_twice(self) -> bool:
        """Whether contracting and remaining axes come from one axis: of positions."""
        contracted = self.sources(self.axes.contracting)
        return bool(contracted & self.sources(self.axes.remaining))

    @property
    def is_of_pairs(self) -> bool:
        """Whether a mask varies along both contracting and remaining axes."""
        return self.is_masked(self.axes.contracting) and self.is_masked(
            self.axes.remaining
        )

    def is_masked(self, axes: Sequence[int]) -> bool:
        """Whether a mask varies along some of its axes."""
        return any(self.facts.axes[axis].has_zeros for axis in axes)


class _Found(NamedTuple):
    verdict: Verdict
    rank: int
    """How clear it is that the operand is the masked one."""


def _giver(masked: _Operand, other: _Operand) -> _Found | None:
    """Decides whether `other` gives its scales to `masked`; None if nothing is masked.

    Only the scale of an activation sees anything.
    """
    if other.kind != "activation":
        return None
    is_masked = masked.is_masked(masked.axes.contracting)
    is_hidden = is_masked or masked.is_softmax
    if not is_hidden and not masked.sees_twice:
        return None
    rank = 4 * masked.is_softmax + 2 * masked.is_of_pairs + masked.sees_twice
    if masked.kind == "activation" and _is_of_features(masked, other):
        return _Found(Verdict(moves=other.side), rank)
    contracted = other.sources(other.axes.contracting)
    if not is_hidden or not contracted:
        # Every result sees all contracted elements, or those are features.
        return None
    return _Found(Verdict(why_float=_UNKNOWN_ROLES), rank)


def _is_of_features(masked: _Operand, other: _Operand) -> bool:
    """Whether the remaining axes of `other`, which share a scale, are features."""
    shared = other.sources(other.axes.remaining)
    if not shared:
        return True
    # Features that are an input themselves: values given to a function of attention,
    # or tokens of which a mask chooses some for each slot of an expert.
    positions = masked.sources((*masked.axes.contracting, *masked.axes.remaining))
    positions |= other.sources(other.axes.contracting)
    is_choice = masked.is_of_pairs and not masked.sources(masked.axes.remaining)
    # Other axes of the inputs whose positions are masked.
    inputs = {index for index, _ in positions}
    is_clear = (
        masked.is_softmax
        or masked.sees_twice
        or is_choice
        or (masked.is_of_pairs and {index for index, _ in shared} <= inputs)
    )
    return is_clear and not shared & positions


def _is_over_time(site: Site) -> bool:
    """Whether a convolution looks at earlier positions alone, along any axis.

    The input may be padded by an equation before the convolution.
    """
    params = site.eqn.params
    spec = params["dimension_numbers"]
    shape = site.eqn.invars[1].aval.shape
    facts, kernel = (origin.facts for origin in site.operands)
    for i, (lhs_axis, rhs_axis) in enumerate(
        zip(spec.lhs_spec[2:], spec.rhs_spec[2:], strict=True)
    ):
        reach = (shape[rhs_axis] - 1) * params["rhs_dilation"][i]
        before, after = facts.axes[lhs_axis].padding
        low, high = params["padding"][i]
        is_dilated = params["lhs_dilation"][i] > 1
        if is_dilated and high + after > 0:
            continue
        # What is padded on both sides by all of the window is cut to one side after.
        if low + before >= reach > 0:
            return True
        # A step of decoding: the last inputs, kept, with the newest one after them.
        length = site.eqn.invars[0].aval.shape[lhs_axis]
        if reach > 0 and after == 1 and (low, high, length) == (0, 0, reach + 1):
            return True
        is_masked = kernel.axes[rhs_axis].has_zeros and not kernel.is_constant
        if reach > 0 and is_masked:
            return True  # Parameters with a mask, as of PixelCNN.
    return False


def _of_conv(site: Site) -> Verdict:
    """Decides about a convolution with an input whose scale is dynamic."""
    return Verdict(why_float=_OVER_TIME) if _is_over_time(site) else _AS_CONFIGURED
