"""Names of arrays: paths in the tree of variables, as strings.

The steps of a path are joined by slashes. Slashes and percent signs inside a step are
escaped as in URLs (``%2F``, ``%25``), so that distinct paths have distinct names.
"""

import itertools
import unicodedata
from collections.abc import Iterable
from typing import Any

from aqtlite.checkpoint.errors import CheckpointError


def name_of(steps: Iterable[str]) -> str:
    """Joins the steps of a path.

    >>> name_of(["params", "mlp/linear", "w"])
    'params/mlp%2Flinear/w'
    """
    return "/".join(s.replace("%", "%25").replace("/", "%2F") for s in steps)


def steps_of(name: str) -> tuple[str, ...]:
    """Splits a name into the steps that `name_of` joined.

    >>> steps_of("params/mlp%2Flinear/w")
    ('params', 'mlp/linear', 'w')
    """
    return tuple(s.replace("%2F", "/").replace("%25", "%") for s in name.split("/"))


def path_name(path: Iterable[Any]) -> str:
    """Returns the name of a `jax.tree_util` key path."""
    return name_of(_step(key) for key in path)


def plain(name: str) -> str:
    """Undoes the escaping of a name, for matching against patterns.

    >>> plain("params/mlp%2Flinear/w")
    'params/mlp/linear/w'
    """
    return "/".join(steps_of(name))


def check_tree(names: Iterable[str], where: str) -> None:
    """Checks that arrays of these names fit into one tree, and into one folder.

    Raises:
        CheckpointError: if a name could lead out of the folder or cannot be printed,
            or if one path is a prefix of another.
    """
    paths = sorted(steps_of(name) for name in names)
    for path in paths:
        name = "/".join(path)
        # The statistics of an NNX model's root module have an empty step inside.
        inside = (step for step in path[1:-1] if step)
        parts = "/".join((path[0], *inside, path[-1])).split("/")
        if any(part in ("", ".", "..") for part in parts):
            raise CheckpointError(
                f"{where} names an array {name!r}, which has a step that is empty, '.' "
                "or '..'; rename it"
            )
        if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name):
            raise CheckpointError(
                f"{where} names an array {name!r}, with control characters; rename it"
            )
    # In sorted order, a path comes directly before the paths that extend it.
    for path, following in itertools.pairwise(paths):
        if following[: len(path)] == path:
            raise CheckpointError(
                f"{where} holds {'/'.join(path)!r} and {'/'.join(following)!r}, which "
                "do not fit into one tree: the first is an array where the second has "
                "a level; rename one of them"
            )


def _step(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
