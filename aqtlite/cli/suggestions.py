"""Suggestions for mistyped names."""

import argparse
import difflib
from collections.abc import Callable, Iterable


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Returns a hint with the closest of the names; empty if none is close.

    >>> did_you_mean("fp9", ["fp8", "qat"])
    "; did you mean 'fp8'?"
    >>> did_you_mean("int8", ["fp8", "qat"])
    ''
    """
    near = difflib.get_close_matches(name, list(names), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def one_of(kind: str, names: Iterable[str]) -> Callable[[str], str]:
    """Returns an argparse `type` that accepts one of the given names.

    Args:
        kind: what the names denote, for the error message.
        names: accepted names.
    """
    known = tuple(names)

    def checked(name: str) -> str:
        if name not in known:
            hint = did_you_mean(name, known) or f"; there are {', '.join(known)}"
            raise argparse.ArgumentTypeError(f"no {kind} {name!r}{hint}")
        return name

    return checked
