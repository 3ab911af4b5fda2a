"""Results whose bits are the same on other machines, and next year."""

import hashlib
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from aqtlite.jaxpr import tracing
from aqtlite.program.modules import flax_models
from aqtlite.shapes.sharding import describe as type_of
from aqtlite.testing import differences, two_programs
from aqtlite.testing.traced_values import TracedValues

_DIGEST = re.compile("[0-9a-f]{16}")


def digest(tree: Any) -> str:
    """Returns a digest of a pytree of arrays: 16 hexadecimal digits.

    It depends on paths, shapes, dtypes and bits, and on nothing else: not on the
    machine, the process or versions. All NaN are one value; 0.0 and -0.0 are two.

    >>> import jax.numpy as jnp
    >>> digest({"kernel": jnp.arange(6, dtype=jnp.float32).reshape(2, 3)})
    'b7b9a8075d35cfe6'

    Args:
        tree: pytree of arrays, random keys and Python numbers, which count as the
            arrays that JAX makes of them.

    Raises:
        TypeError: if a leaf is something else.
        ValueError: if there are no leaves.
    """
    leaves = jax.tree.leaves_with_path(tree)
    if not leaves:
        raise ValueError("a digest needs arrays, and the pytree has none")
    hashed = hashlib.sha256()
    for path, leaf in leaves:
        hashed.update(_content(jax.tree_util.keystr(path), jnp.asarray(leaf)))
    return hashed.hexdigest()[:16]


def assert_reproducible(
    fn: Callable[..., Any],
    *args: Any,
    digest: str,
    equations: str | os.PathLike[str] | None = None,
) -> None:
    """Asserts that results have the bits that they had when their digest was written.

    A golden test: it fails where another processor, another version of JAX or a change
    of the model gives other bits. `aqtlite.invariant` makes functions whose results do
    not depend on the first two. Parameters by `jax.random.normal` do, so save those of
    the test, or draw them with NumPy.

    >>> import aqtlite
    >>> import numpy as np
    >>> x = np.random.default_rng(0).normal(size=(4, 100)).astype(np.float32)
    >>> softmax = aqtlite.invariant(jax.nn.softmax)
    >>> assert_reproducible(softmax, x, digest="0123456789abcdef")
    Traceback (most recent call last):
    ...
    AssertionError: the results have the digest '...', not '0123456789abcdef'. ...

    Args:
        fn: function of pytrees of arrays, or an NNX module. It runs under `jax.jit`.
        *args: its arguments.
        digest: the digest (`aqtlite.testing.digest`) of its results. Write any 16 zeros
            first, and take the digest from the message of the error.
        equations: a text file with a short digest for each equation of the program,
            by which a failure names the first equation whose result differs. If there
            is none, it is written once the results have their digest: commit it.

    Raises:
        AssertionError: if results have another digest. The message has it, and the
            first equation that differs, by path, if `equations` tells.
        ValueError: if `digest` is none, or `fn` returns no arrays.
    """
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError(
            f"digest={digest!r} is no digest: it has 16 hexadecimal digits, such as "
            f"digest={'0' * 16!r}. The message of a failure has the right one"
        )
    traced = flax_models.trace(fn, args)
    inputs = [jnp.asarray(x) for x in traced.values(args)]
    outputs = jax.jit(core.jaxpr_as_fun(traced.jaxpr))(*inputs)
    found = _digest_of(jax.tree.map(lambda i: outputs[i], traced.outputs))
    path = None if equations is None else pathlib.Path(equations)
    if found == digest:
        if path is not None and not path.exists():
            path.write_text("\n".join(_lines(traced, inputs)) + "\n")
        return
    message = f"the results have the digest {found!r}, not {digest!r}. "
    if path is None:
        message += (
            "equations=FILE, written where the digest is right, would tell which "
            "equation differs first"
        )
    elif not path.exists():
        message += (
            f"{path}, which would tell the equation, is written where it is right"
        )
    else:
        message += _first(path.read_text().splitlines(), _lines(traced, inputs))
    raise AssertionError(message)


_digest_of = digest


def _content(name: str, x: jax.Array) -> bytes:
    """Returns what is digested of an array."""
    value = differences.data(x)
    kind = f"{name} {x.dtype} {value.shape} "
    if jnp.issubdtype(value.dtype, jnp.inexact):
        value = np.where(np.isnan(value), np.asarray(np.nan, value.dtype), value)
    return kind.encode() + np.ascontiguousarray(value).tobytes()


def _lines(traced: tracing.Traced, inputs: list[Any]) -> list[str]:
    """Returns a line for each input and equation: its digest, and what it is."""
    values = TracedValues.of(traced.jaxpr)
    made = values.run(*inputs)
    lines = [f"{_short(x)} input {i} {type_of(x)}" for i, x in enumerate(inputs)]
    for one in values.equations:
        digests = "".join(_short(made[number]) for number in one.outputs)
        lines.append(f"{digests or '-'} {two_programs.shown(one)}")
    return lines


def _short(x: Any) -> str:
    return hashlib.sha256(_content("", x)).hexdigest()[:8]


def _first(wanted: list[str], found: list[str]) -> str:
    """Names the first equation of two lists of lines that differs."""
    for number, (line, other) in enumerate(zip(wanted, found, strict=False)):
        (old, what), (new, its) = (x.split(" ", 1) for x in (line, other))
        if what != its:
            return (
                f"The program is another one from equation {number} on: {its}, which "
                f"was {what}"
            )
        if old != new:
            if what.startswith("input "):
                return f"The arguments are others: {what}"
            return f"The first equation whose result differs is {what}"
    if len(wanted) != len(found):
        return f"The program has {len(found)} equations, and had {len(wanted)}"
    return (
        "A program that returns all of its values gives no such difference: it comes "
        "from operations that are compiled together"
    )
