"""Contractions of a program about which no rule has decided."""

from aqtlite import config
from aqtlite.jaxpr.sites import Site
from aqtlite.program.naming import Name
from aqtlite.program.of_equation import equation_of
from aqtlite.program.planned import PlannedContraction
from aqtlite.program.planned_operand import PlannedOperand


def undecided(
    site: Site, name: Name, kept_as: str, lhs: PlannedOperand, rhs: PlannedOperand
) -> PlannedContraction:
    """Returns a contraction in float, with no reason to stay so.

    Args:
        site: the contraction.
        name: names of the contraction.
        kept_as: as `PlannedContraction.kept_as`.
        lhs: left operand of its equation.
        rhs: right operand of its equation.
    """
    return PlannedContraction(
        path=name.path,
        module=name.module,
        kept_under=name.kept_under,
        kept_as=kept_as,
        op=site.operation,
        registered=site.registered,
        equation=equation_of(site.eqn),
        lhs=lhs,
        rhs=rhs,
        rule=None,
        cfg=config.unquantized(),
        why_float=None,
        why_not_smoothed=None,
        is_injected=False,
        site=site,
    )
