"""The arguments of a traced call that have places along an axis."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from aqtlite.jaxpr import tracing
from aqtlite.shapes.sharding import describe as type_of


def along(
    traced: tracing.Traced,
    args: tuple[Any, ...],
    inputs: Sequence[jax.Array],
    axis: int,
    argnums: int | Sequence[int] | None,
    noun: str,
    counts: Callable[[jax.Array], bool],
) -> dict[int, int]:
    """Returns the axis of the places, for each input that has several.

    Args:
        traced: the traced call.
        args: its arguments.
        inputs: inputs of its jaxpr.
        axis: the axis of the places.
        argnums: positions of the arguments that have them; None for all.
        noun: what the places are.
        counts: whether an input with several places counts.

    Raises:
        ValueError: if no argument has several places, several have different numbers
            of them, or an argument is asked for that was not given.
    """
    paths = [jax.tree.leaves_with_path(args)[i][0] for i in traced.leaves]
    names = [f"args{jax.tree_util.keystr(path)}" for path in paths]
    chosen = _chosen(argnums, len(args))
    given = {
        i: axis % x.ndim
        for i, x in enumerate(inputs)
        if paths[i][0].idx in chosen and size(x, axis) > 1 and counts(x)
    }
    sizes = {names[i]: inputs[i].shape[one] for i, one in given.items()}
    if not sizes:
        found = ", ".join(map(_shown, names, inputs))
        raise ValueError(
            f"no argument has several {noun} along axis {axis} that could get "
            f"other values, among {found or 'no arrays'}: pass another axis=, or "
            f"arrays with at least two {noun}"
        )
    if len({*sizes.values()}) > 1:
        found = ", ".join(f"{name} {count}" for name, count in sizes.items())
        raise ValueError(
            f"the arguments have different numbers of {noun} along axis {axis}: "
            f"{found}. Name those that get other values, argnums=..., or bind the "
            "others to the function"
        )
    return given


def size(x: Any, axis: int) -> int:
    """Returns the size of an axis, 0 if there is none."""
    return x.shape[axis] if -x.ndim <= axis < x.ndim else 0


def _chosen(argnums: int | Sequence[int] | None, count: int) -> set[int]:
    """Returns the positions of the arguments that may get other values.

    Raises:
        ValueError: if there is no such argument.
    """
    if argnums is None:
        return set(range(count))
    positions = [argnums] if isinstance(argnums, int) else list(argnums)
    wrong = [i for i in positions if not -count <= i < count]
    if wrong:
        raise ValueError(
            f"argnums={argnums!r} names the argument {wrong[0]}, and {count} were given"
        )
    return {i % count for i in positions}


def _shown(name: str, x: jax.Array) -> str:
    return f"{name} {type_of(x)}"
