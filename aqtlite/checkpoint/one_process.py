"""Conversions and files are made in one process of a program, of arrays in it."""

from typing import TypeVar

import jax

from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.shapes import processes

Tree = TypeVar("Tree")


def own(tree: Tree, name: str) -> Tree:
    """Returns a tree whose arrays this process can read by itself.

    Args:
        tree: pytree of arrays and of anything else.
        name: what the tree is.

    Raises:
        CheckpointError: if an array has parts in other processes.
    """
    for path, x in jax.tree.leaves_with_path(tree):
        if processes.spans(x):
            raise CheckpointError(
                f"{name}{jax.tree_util.keystr(path)} has parts in other processes, and "
                "this runs in one: gather the arrays in all processes, by jax."
                "experimental.multihost_utils.process_allgather(tree, tiled=True), "
                "then give those to one"
            )
    return tree


def advice() -> str:
    """Returns the end of an error message; empty in a program of one process."""
    if jax.process_count() == 1:
        return ""
    return (
        f". This is process {jax.process_index()} of a program: convert in one of "
        "them, while the others wait"
    )
