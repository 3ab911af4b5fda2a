"""Reasons why an equation of a program cannot be replaced by a quantized one."""

from aqtlite.jaxpr.sites import Site


def why_not_replaced(site: Site) -> str | None:
    """Returns why an equation cannot be replaced, or None if it can."""
    if site.scope.is_of_gradient:
        return (
            "it is part of a gradient that the function takes; quantize the function "
            "that is differentiated"
        )
    return site.obstacle
