"""Modules of Flax around equations, as marks among their name scopes.

Flax names a scope after a module and its method (``decoder.hidden``), where a module
is called, and NNX names none. A mark inside of it says which module it is: as the steps
from the module around it, so that the equations of equal layers have equal marks.
"""

import contextlib
import contextvars
import re
from collections.abc import Iterator
from typing import NamedTuple
from urllib import parse

import jax

Path = tuple[str, ...]

# A user context is part of JAX's cache keys, so traces with and without it stay apart.
_is_marking = jax.make_user_context(default_value=False)

_MARK = re.compile("flax=(.*)")
"""A mark, which may be empty: JAX takes a name that ends with a colon for no scope, and
drops those around it from the names of what it lowers."""

_ROOT, _ABSOLUTE = "@", "/"
_EQUATION = re.compile(".*->.*")


class Module(NamedTuple):
    """A module of a model."""

    root: str
    """Name of the model, with which paths begin; empty for none."""

    path: Path
    """Steps from the model to the module."""


_around: contextvars.ContextVar[Module | None] = contextvars.ContextVar(
    "module", default=None
)


class Resolved(NamedTuple):
    """A name scope with its marks read.

    >>> resolved("Model/flax=%40Model/decoder.hidden/flax=decoder/heads/ab,bc->ac")
    ... # doctest: +NORMALIZE_WHITESPACE
    Resolved(path='Model/decoder/heads/ab,bc->ac', module='decoder',
             inside='heads/ab,bc->ac',
             written='Model/decoder.hidden/heads/ab,bc->ac', is_marked=True)
    """

    path: str
    """Path of the module, after the name of the model and the scopes around it, and
    before the scopes inside of the module."""

    module: str
    """Path of the module in its model; without marks, the scopes but for equations."""

    inside: str
    """Scopes inside of the module."""

    written: str
    """Scopes without the marks."""

    is_marked: bool
    """Whether there are marks."""


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """Lets `entering` leave marks."""
    before = _around.set(None)
    try:
        with _is_marking(True):
            yield
    finally:
        _around.reset(before)


@contextlib.contextmanager
def entering(module: Module) -> Iterator[None]:
    """Marks the equations of a method of a module; see `marking`."""
    if not _is_marking.value:
        yield
        return
    before = _around.get()
    marks = _marks(before, module)
    if before is not None and not module.root:
        module = module._replace(root=before.root)
    token = _around.set(module)
    try:
        with contextlib.ExitStack() as scopes:
            for mark in marks:
                scopes.enter_context(jax.named_scope(f"flax={parse.quote(mark, '')}"))
            yield
    finally:
        _around.reset(token)


def _marks(around: Module | None, module: Module) -> list[str]:
    """Returns the steps from a module to the one that it calls."""
    path = "/".join(module.path)
    is_root = not module.path and module.root
    if around is None or (is_root and module.root != around.root):
        return [_ROOT + module.root, *([path] if path else [])]
    count = len(around.path)
    if module.path[:count] == around.path:
        return ["/".join(module.path[count:])]
    return [_ABSOLUTE + path]


def resolved(scope: str) -> Resolved:
    """Reads the marks of a name scope, as from `scopes.parse`."""
    names = scope.split("/") if scope else []
    before: list[str] = []
    root, module, inside, is_marked = "", list[str](), list[str](), False
    for name in names:
        found = _MARK.fullmatch(name)
        if found is None:
            inside.append(name)
            continue
        is_marked, mark = True, parse.unquote(found[1])
        if mark.startswith(_ROOT):
            before += [root, *module]
            root, module = mark.removeprefix(_ROOT), []
            before += _without_calls(inside, root)
            inside = []
        elif not mark:
            inside = _without_call(inside, (root, *module)[-1])
        else:
            is_absolute = mark.startswith(_ABSOLUTE)
            steps = mark.removeprefix(_ABSOLUTE).split("/")
            module, inside = steps if is_absolute else [*module, *steps], []
    written = [name for name in names if not _MARK.fullmatch(name)]
    if not is_marked:
        of_module = [name for name in written if not _EQUATION.fullmatch(name)]
        return Resolved(scope, "/".join(of_module), "", scope, False)
    return Resolved(
        "/".join(filter(None, [*before, root, *module, *inside])),
        "/".join(filter(None, module)),
        "/".join(inside),
        "/".join(written),
        True,
    )


def _without_calls(scopes: list[str], root: str) -> list[str]:
    """As `_without_call`, without the method of a model around its ``__call__``.

    A class of Linen may have its own `apply` that calls `flax.linen.Module.apply`.
    """
    scopes = _without_call(scopes, root)
    while scopes and scopes[-1].startswith(f"{root}."):
        scopes = scopes[:-1]
    return scopes


def _without_call(scopes: list[str], name: str) -> list[str]:
    """Takes off the scope that Flax names after a module and its method, if any."""
    is_named = name and scopes and scopes[-1].partition(".")[0] == name
    return scopes[:-1] if is_named else scopes
