"""Names of contractions: by the scopes around them, or by the parameters in them."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from aqtlite.jaxpr.sites import Site
from aqtlite.program import injected

Naming = Callable[[Sequence[Site], Mapping[int, str]], list[str]]
"""Takes contractions, in the order of the program, and the names of the inputs that are
parameters, by index; returns a path for each contraction, perhaps the same for some."""


Paths = Literal["scopes", "parameters"]
"""What the paths of a function's contractions are made of; see `quantize_function`."""

# Equinox leaves the classes of its layers, and `jnp.einsum` its equation: they tell
# what a contraction is, and not which.
_CLASS = re.compile(r"eqx\.nn\.\w+")
_EQUATION = re.compile(r".*->.*")


def naming_of(paths: Paths) -> Naming:
    """Returns what gives a function's contractions their paths.

    Raises:
        ValueError: if `paths` is none of the known ones.
    """
    namings: dict[str, Naming] = {
        "scopes": by_scope_or_leaf,
        "parameters": by_leaf,
    }
    if paths not in namings:
        known = " or ".join(repr(name) for name in namings)
        raise ValueError(f"paths must be {known}, got {paths!r}")
    return namings[paths]


def by_scope(sites: Sequence[Site], parameters: Mapping[int, str]) -> list[str]:
    """The name scopes around each contraction.

    Args:
        sites: the contractions.
        parameters: are not looked at.
    """
    del parameters
    return [injected.without_mark(site.scope.path) for site in sites]


def by_scope_or_leaf(sites: Sequence[Site], parameters: Mapping[int, str]) -> list[str]:
    """The name scopes around each contraction; where there are none, as `by_leaf`.

    The classes of Equinox's layers, and equations, alone are none.

    Args:
        sites: the contractions, in the order of the program.
        parameters: the paths of the inputs that are parameters, by index.
    """
    scopes, leaves = by_scope(sites, parameters), by_leaf(sites, parameters)
    return [
        scope if _tells_which(scope) else leaf
        for scope, leaf in zip(scopes, leaves, strict=True)
    ]


def by_leaf(sites: Sequence[Site], parameters: Mapping[int, str]) -> list[str]:
    """The path of the parameter that is contracted, in the pytree of parameters.

    A weight made of several has the innermost node around them. A contraction of
    activations has the innermost node around the weights that are contracted before and
    behind it, and then its name scopes.

    Args:
        sites: the contractions, in the order of the program.
        parameters: the paths of the inputs that are parameters, by index. Their first
            step is the argument, and left out if there is one such argument alone.
    """
    arguments = {path.partition("/")[0] for path in parameters.values()}
    is_single = len(arguments) == 1 and all(one.isdigit() for one in arguments)
    steps = {i: tuple(path.split("/"))[is_single:] for i, path in parameters.items()}
    of_weights = [_holder(site, steps) for site in sites]
    nodes = [one if one is None else one[:-1] for one in of_weights]
    scopes = by_scope(sites, parameters)
    return [
        _joined(_around(nodes, i), _without_classes(scope))
        if leaf is None
        else "/".join(leaf)
        for i, (leaf, scope) in enumerate(zip(of_weights, scopes, strict=True))
    ]


def _tells_which(scope: str) -> bool:
    names = filter(None, scope.split("/"))
    return any(not _CLASS.fullmatch(x) and not _EQUATION.fullmatch(x) for x in names)


def _without_classes(scope: str) -> str:
    return "/".join(name for name in scope.split("/") if not _CLASS.fullmatch(name))


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
    steps = {i: tuple(path.split("/")[1:-1]) for i, path in parameters.items()}
    of_weights = [_holder(site, steps) for site in sites]
    modules = [
        _around(of_weights, i) if module is None else module
        for i, module in enumerate(of_weights)
    ]
    scopes = by_scope(sites, parameters)
    return [
        _joined(module, scope) for module, scope in zip(modules, scopes, strict=True)
    ]


_Node = tuple[str, ...]
"""The steps to a node of a pytree, or to a module."""


def _joined(node: _Node, scope: str) -> str:
    return "/".join(part for part in (*node, scope) if part)


def _holder(site: Site, nodes: Mapping[int, _Node]) -> _Node | None:
    """The innermost node around those of the parameters of a weight; None without one.

    Args:
        site: the contraction.
        nodes: nodes of the inputs that are parameters, by index.
    """
    found = [
        nodes[i]
        for origin in site.operands
        if origin.identity is not None
        for i in origin.needed
        if isinstance(i, int) and i in nodes
    ]
    return _innermost(found) if found else None


def _around(of_weights: Sequence[_Node | None], index: int) -> _Node:
    """The innermost node around the next weights before a contraction and behind."""
    before = [one for one in of_weights[:index] if one is not None]
    behind = [one for one in of_weights[index + 1 :] if one is not None]
    return _innermost([(before or [()])[-1], (behind or [()])[0]])


def _innermost(nodes: Sequence[_Node]) -> _Node:
    """The innermost node around some nodes: the steps that their paths share."""
    shared = itertools.takewhile(
        lambda steps: len(set(steps)) == 1, zip(*nodes, strict=False)
    )
    return tuple(steps[0] for steps in shared)
