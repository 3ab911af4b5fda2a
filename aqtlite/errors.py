"""Warnings, errors of the command line, and wrong arguments in messages."""

import contextlib
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

_NO_SCOPE = "(no name scope)"
"""Text for the path of a contraction outside all modules and name scopes."""


class UserError(Exception):
    """A mistake that the user can fix; the message is one line, or a list."""

    exit_code = 2


class RulesError(UserError, ValueError):
    """Error for rules that do not fit the contractions of a program."""


class UnwritableError(UserError, OSError):
    """Error for a file that cannot be written, made of the arguments of `OSError`."""

    def __str__(self) -> str:
        return f"{self.filename} cannot be written: {self.strerror}"


class NoArithmeticError(TypeError):
    """Error for arithmetic with a `QTensor`, which has none."""


class CostWarning(UserWarning):
    """A costly calibration, meant to run once on weights, runs at every training step.

    Issued when a gradient is traced, once per config path with such a calibration.
    ``warnings.simplefilter("ignore", CostWarning)`` silences it.
    """


@contextlib.contextmanager
def naming(contraction: str) -> Iterator[None]:
    """Begins the message of a ValueError with the path of a contraction."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"the contraction {quoted(contraction)}: {error}") from error


def label(path: str) -> str:
    """Returns the path of a contraction as tables and lists show it."""
    return path or _NO_SCOPE


def quoted(path: str) -> str:
    """Returns the path of a contraction as messages give it, in quotes.

    >>> quoted("decoder/up"), quoted("")
    ("'decoder/up'", '(no name scope)')
    """
    return repr(path) if path else _NO_SCOPE


def brief(x: Any) -> str:
    """Describes a wrong argument in a message, without the elements of arrays.

    >>> import numpy as np
    >>> brief(({"w": np.ones((2, 3), np.float32), "b": 0.5}, dict, max))
    "(dict('w': float32[2,3], 'b': 0.5), class dict, function max)"

    Args:
        x: any object. Of a tuple, list or mapping, the first items are described.
    """
    return _brief(x, depth=3)


def class_of(x: Any) -> str:
    """Returns the name of an object's class, with the package it is from.

    Classes of other libraries may have the names of ours.

    >>> import fractions
    >>> class_of(1), class_of(fractions.Fraction(1))
    ('int', 'Fraction of fractions')
    """
    package, name = type(x).__module__.partition(".")[0], type(x).__name__
    is_known = package in ("builtins", "__main__", "aqtlite")
    return name if is_known else f"{name} of {package}"


_MOST = 3
"""Number of items of a container that are described."""


def _brief(x: Any, depth: int) -> str:
    if isinstance(x, type):
        return f"class {x.__name__}"
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        shape = ",".join(map(str, x.shape)) if isinstance(x.shape, tuple) else x.shape
        return f"{getattr(x.dtype, 'name', x.dtype)}[{shape}]"
    if x is None or isinstance(x, str | bytes | int | float | complex):
        return reprlib.repr(x)
    kind = type(x).__name__
    if isinstance(x, Mapping):
        pairs = [
            f"{reprlib.repr(key)}: {_brief(x[key], depth - 1)}"
            for key, _ in zip(x, range(_MOST if depth else 0), strict=False)
        ]
        return f"{kind}({_joined(pairs, len(x))})"
    if isinstance(x, tuple | list):
        items = [_brief(one, depth - 1) for one in x[: _MOST if depth else 0]]
        name = "" if type(x) is tuple else kind
        return f"{name}({_joined(items, len(x))})"
    called = getattr(x, "__name__", None)
    if callable(x) and isinstance(called, str):
        return f"function {called}"
    return class_of(x)


def _joined(items: list[str], count: int) -> str:
    return ", ".join([*items, *["..."] * (len(items) < count)])
