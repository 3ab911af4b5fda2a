"""Names of parameters, and paths of contractions: from name scopes or parameters."""

import collections
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax

from aqtlite import errors
from aqtlite.jaxpr import module_scopes, tracing
from aqtlite.jaxpr.module_scopes import Resolved
from aqtlite.jaxpr.sites import Site

Parameters = int | Sequence[int] | Callable[[str], bool] | None
"""The arguments of a function that are parameters; see `quantize_function`."""


class Name(NamedTuple):
    """Names of a contraction. Others may have equal ones."""

    path: str
    """Path that rules match."""

    module: str
    """Path of its module in the model, without scopes inside of the module."""

    kept_under: str
    """Name under which its weights and states are kept, the same in all versions: of
    modules of Linen, with the names of their methods."""


Naming = Callable[[Sequence[Site], Mapping[int, str]], list[Name]]
"""Function from contractions, in program order, and the names of parameter inputs, by
index, to the names of each contraction."""


Paths = Literal["scopes", "parameters"]
"""Source of the paths of a function's contractions; see `quantize_function`."""

# Equinox adds scopes for the classes of its layers, and `jnp.einsum` for its equation.
# They tell what a contraction is, not which one.
_CLASS = re.compile(r"eqx\.nn\.\w+")
_EQUATION = re.compile(r".*->.*")


def positions_of(params: Any) -> Parameters:
    """Returns `params` of `quantize_function` in a hashable form.

    Raises:
        TypeError: if it is not of a type that `quantize_function` takes.
    """
    if params is None or callable(params):
        return params
    positions = tuple(params) if isinstance(params, Sequence) else (params,)
    if isinstance(params, str) or not all(type(one) is int for one in positions):
        raise TypeError(
            "params must be the position of an argument, several of them, or a "
            "function of the path of a leaf, such as "
            f"lambda path: path.startswith('0/encoder/'), got "
            f"{errors.brief(params)}"
        )
    return positions if isinstance(params, Sequence) else params


def names_of_parameters(
    params: Parameters,
    traced: tracing.Traced,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[int, str]:
    """Returns the names of the jaxpr's inputs that are parameters, by index."""
    if params is None:
        return {}
    if callable(params):
        is_parameter = params
    else:
        positions = (params,) if isinstance(params, int) else tuple(params)
        wrong = [i for i in positions if not -len(args) <= i < len(args)]
        if wrong:
            raise ValueError(
                f"params={params!r} names the argument {wrong[0]}, and the function "
                f"was called with {len(args)} positional arguments"
            )
        heads = {str(i % len(args)) for i in positions}

        def is_parameter(path: str) -> bool:
            return path.partition("/")[0] in heads

    flat = jax.tree.leaves_with_path((args, kwargs))
    paths = [jax.tree_util.keystr(p[1:], simple=True, separator="/") for p, _ in flat]
    return {
        i: paths[leaf]
        for i, leaf in enumerate(traced.leaves)
        if is_parameter(paths[leaf])
    }


def naming_of(paths: Paths) -> Naming:
    """Returns the naming function for a value of `Paths`.

    Raises:
        ValueError: if `paths` is unknown.
    """
    namings: dict[str, Naming] = {
        "scopes": by_scope_or_leaf,
        "parameters": by_leaf,
    }
    if paths not in namings:
        known = " or ".join(repr(name) for name in namings)
        raise ValueError(f"paths must be {known}, got {paths!r}")
    return namings[paths]


def _resolved(site: Site) -> Resolved:
    return module_scopes.resolved(site.scope.path)


def by_scope(sites: Sequence[Site], parameters: Mapping[int, str]) -> list[Name]:
    """Returns the module and the name scopes around each contraction.

    Args:
        sites: the contractions.
        parameters: not used.
    """
    del parameters
    scopes = map(_resolved, sites)
    return [Name(one.path, one.module, one.written) for one in scopes]


def by_scope_or_leaf(
    sites: Sequence[Site], parameters: Mapping[int, str]
) -> list[Name]:
    """Returns the name scopes around each contraction; without any, as `by_leaf`.

    Scopes that are classes of Equinox's layers or equations do not count.

    Args:
        sites: the contractions, in program order.
        parameters: paths of the inputs that are parameters, by index.
    """
    scopes, leaves = by_scope(sites, parameters), by_leaf(sites, parameters)
    return [
        scope if _tells_which(scope.path) else leaf
        for scope, leaf in zip(scopes, leaves, strict=True)
    ]


def by_leaf(sites: Sequence[Site], parameters: Mapping[int, str]) -> list[Name]:
    """Returns the path of the contracted parameter in the pytree of parameters.

    For a weight made of several parameters: the innermost node that contains them. For
    a contraction of activations: the innermost node that contains the nearest weights
    contracted before and after it, followed by its name scopes.

    Args:
        sites: the contractions, in program order.
        parameters: paths of the inputs that are parameters, by index. Their first step
            is the argument; it is omitted if only one positional argument has any.
    """
    is_single = _are_of_one_argument(parameters)
    steps = {i: tuple(path.split("/"))[is_single:] for i, path in parameters.items()}
    of_weights = [_holder(site, steps) for site in sites]
    nodes = [one if one is None else one[:-1] for one in of_weights]
    names = []
    for i, (site, leaf, node) in enumerate(zip(sites, of_weights, nodes, strict=True)):
        node = _around(nodes, i) if node is None else node
        scopes = _without_classes(_resolved(site).written)
        path = _joined(node, scopes) if leaf is None else "/".join(leaf)
        names.append(Name(path, "/".join(node), path))
    return names


def names_of_weights(site: Site, parameters: Mapping[int, str]) -> tuple[str, ...]:
    """Returns the paths of the parameters of a contraction's weights.

    Args:
        site: the contraction.
        parameters: as in `by_leaf`, whose rule tells whether the first step, the
            argument, is omitted.
    """
    weights = [x for x in site.operands if x.identity is not None]
    read = frozenset().union(*(x.inputs for x in weights)) & parameters.keys()
    names = [parameters[i] for i in sorted(read)]
    if not _are_of_one_argument(parameters):
        return tuple(names)
    return tuple(name.partition("/")[2] or name for name in names)


def _are_of_one_argument(parameters: Mapping[int, str]) -> bool:
    arguments = {path.partition("/")[0] for path in parameters.values()}
    return len(arguments) == 1 and all(one.isdigit() for one in arguments)


def _tells_which(scope: str) -> bool:
    names = filter(None, scope.split("/"))
    return any(not _CLASS.fullmatch(x) and not _EQUATION.fullmatch(x) for x in names)


def _without_classes(scope: str) -> str:
    return "/".join(name for name in scope.split("/") if not _CLASS.fullmatch(name))


def by_parameter(sites: Sequence[Site], parameters: Mapping[int, str]) -> list[Name]:
    """Returns the path of each contraction's module, followed by the scopes inside.

    For frameworks that add no name scopes of their own. A contraction of a weight
    belongs to the innermost module that contains its parameters; the path of a
    parameter without the last step is that of its module. A contraction of activations
    belongs to the module that is marked, or else to the innermost one that contains the
    nearest weights contracted before and after it: attention scores, for example, to
    the module of the four projections. The names to keep them under know no marks.

    Args:
        sites: the contractions, in program order.
        parameters: paths of the inputs that are parameters, by index. The first step
            is the argument, which is not part of the module's path.
    """
    steps = {i: tuple(path.split("/")[1:-1]) for i, path in parameters.items()}
    of_weights = [_holder(site, steps) for site in sites]
    names = []
    for i, (site, module) in enumerate(zip(sites, of_weights, strict=True)):
        scope = _resolved(site)
        kept_in = _around(of_weights, i) if module is None else module
        kept_under = _joined(kept_in, scope.written)
        if not scope.is_marked:
            names.append(Name(kept_under, "/".join(kept_in), kept_under))
            continue
        path = scope.path if module is None else _joined(module, scope.inside)
        names.append(Name(path, scope.module, kept_under))
    return names


_Node = tuple[str, ...]
"""Path of a node of a pytree, or of a module."""


def _joined(node: _Node, scope: str) -> str:
    return "/".join(part for part in (*node, scope) if part)


def numbered(names: Sequence[str]) -> list[str]:
    """Returns names with ``#`` and a number from the second of equal ones on.

    >>> numbered(["up", "down", "up"])
    ['up', 'down', 'up#1']
    """
    counts: collections.Counter[str] = collections.Counter()
    found = []
    for name in names:
        found.append(f"{name}#{counts[name]}" if counts[name] else name)
        counts[name] += 1
    return found


def _holder(site: Site, nodes: Mapping[int, _Node]) -> _Node | None:
    """Returns the innermost node around a weight's parameters; None without a weight.

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
    """Returns the innermost node around the nearest weights before and after."""
    before = [one for one in of_weights[:index] if one is not None]
    behind = [one for one in of_weights[index + 1 :] if one is not None]
    return _innermost([(before or [()])[-1], (behind or [()])[0]])


def _innermost(nodes: Sequence[_Node]) -> _Node:
    """Returns the longest common prefix of the nodes' paths."""
    shared = itertools.takewhile(
        lambda steps: len(set(steps)) == 1, zip(*nodes, strict=False)
    )
    return tuple(steps[0] for steps in shared)
