"""Names of contractions: by the scopes around them, or by the parameters in them."""

import itertools
from collections.abc import Callable, Mapping, Sequence

from aqtlite.functions import injected
from aqtlite.jaxpr.sites import Site

Naming = Callable[[Sequence[Site], Mapping[int, str]], list[str]]
"""Takes contractions, in the order of the program, and the names of the inputs that are
parameters, by index; returns a path for each contraction, perhaps the same for some."""


def by_scope(sites: Sequence[Site], parameters: Mapping[int, str]) -> list[str]:
    """The name scopes around each contraction.

    Args:
        sites: the contractions.
        parameters: are not looked at.
    """
    del parameters
    return [injected.without_mark(site.scope.path) for site in sites]


def by_parameter(sites: Sequence[Site], parameters: Mapping[int, str]) -> list[str]:
    """The module that each contraction belongs to, then the name scopes around it.

    For frameworks that leave no name scopes. A contraction of a weight belongs to the
    module that holds its parameter, or all of them: the path of a parameter, less its
    last name, is that of a module. A contraction of activations belongs to the
    innermost module around the weights that are contracted before and behind it: the
    products of queries, keys and values to the module of the four projections.

    Args:
        sites: the contractions, in the order of the program.
        parameters: the paths of the inputs that are parameters, by index. The first
            step of a path is the argument, and no part of the module's.
    """
    of_weights = [_holder(site, parameters) for site in sites]
    modules = [
        _around(of_weights, i) if module is None else module
        for i, module in enumerate(of_weights)
    ]
    scopes = by_scope(sites, parameters)
    return [
        "/".join(part for part in (*module, scope) if part)
        for module, scope in zip(modules, scopes, strict=True)
    ]


_Module = tuple[str, ...]


def _holder(site: Site, parameters: Mapping[int, str]) -> _Module | None:
    """The innermost module around the parameters of a weight; None without a weight."""
    modules = [
        tuple(parameters[i].split("/")[1:-1])
        for origin in site.operands
        if origin.identity is not None
        for i in origin.needed
        if isinstance(i, int) and i in parameters
    ]
    return _innermost(modules) if modules else None


def _around(of_weights: Sequence[_Module | None], index: int) -> _Module:
    """The innermost module around the next weights before a contraction and behind."""
    before = [one for one in of_weights[:index] if one is not None]
    behind = [one for one in of_weights[index + 1 :] if one is not None]
    return _innermost([(before or [()])[-1], (behind or [()])[0]])


def _innermost(modules: Sequence[_Module]) -> _Module:
    """The innermost module around some modules: the steps that their paths share."""
    shared = itertools.takewhile(
        lambda steps: len(set(steps)) == 1, zip(*modules, strict=False)
    )
    return tuple(steps[0] for steps in shared)
