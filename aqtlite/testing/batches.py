"""Results whose bits do not depend on the batch around them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from aqtlite.program.modules import flax_models
from aqtlite.testing import arguments, differences, two_programs
from aqtlite.testing.two_programs import Program


def assert_batch_invariant(
    fn: Callable[..., Any],
    *args: Any,
    axis: int = 0,
    argnums: int | Sequence[int] | None = None,
) -> None:
    """Asserts that results of an example have the same bits in any batch.

    Runs the function on all examples, on these in reverse order, without the first one,
    twice after each other, and on the first and the last alone, and compares the
    results of each example bit for bit. `aqtlite.invariant` makes functions of that
    kind; in others, sums of floats and exponentials depend on the shapes around them.

    >>> import jax
    >>> import aqtlite
    >>> x = jax.random.normal(jax.random.key(0), (5, 1001))
    >>> assert_batch_invariant(aqtlite.invariant(jax.nn.softmax), x)
    >>> assert_batch_invariant(lambda x: x / x.shape[0], x)
    Traceback (most recent call last):
    ...
    AssertionError: results of examples depend on the batch. In a batch of ...

    Args:
        fn: function of pytrees of arrays, of a float or a quantized model, such as
            ``functools.partial(model.apply, variables)``, or an NNX module. It runs
            under `jax.jit`.
        *args: its arguments. Arrays with more than one place along `axis` have the
            examples along it; what is bound to `fn`, such as variables, stays as it is.
        axis: axis of the examples, in arguments and results. Results without it are
            not compared.
        argnums: positions of the arguments that have examples; None for all.

    Raises:
        AssertionError: if results differ; the message names the batch, the first
            result, by how much it differs, and the first equation, by path, whose
            result does.
        ValueError: if the comparison could not fail: no argument or no result has
            several examples, or arguments have different numbers of them.
    """
    traced = flax_models.trace(fn, args)
    inputs = [jnp.asarray(x) for x in traced.values(args)]
    given = arguments.along(
        traced, args, inputs, axis, argnums, "examples", lambda x: True
    )
    size = next(inputs[i].shape[along] for i, along in given.items())
    whole = Program(traced.jaxpr, inputs)
    results = {
        f"output{jax.tree_util.keystr(path)}": i
        for path, i in jax.tree.leaves_with_path(traced.outputs)
        if arguments.size(traced.jaxpr.out_avals[i], axis) == size
    }
    if not results:
        raise ValueError(
            f"no result has {size} examples along axis {axis}, as the arguments have: "
            f"{', '.join(map(str, traced.jaxpr.out_avals))}"
        )
    wanted = _run(whole)
    for name, rows in _batches(size):
        some = list(inputs)
        for i, along in given.items():
            some[i] = jnp.take(inputs[i], rows, along)
        leaves, treedef = jax.tree.flatten(args)
        for leaf, x in zip(traced.leaves, some, strict=True):
            leaves[leaf] = x
        its_args = jax.tree.unflatten(treedef, leaves)
        its = flax_models.trace(fn, its_args)
        part = Program(its.jaxpr, its.values(its_args))
        found = _run(part)
        for result, i in results.items():
            along = axis % wanted[i].ndim
            _check_size(result, found[i], along, len(rows))
            first = np.take(wanted[i], rows, along)
            differs = differences.differing(first, found[i])
            if differs.any():
                text = differences.describe(
                    first, found[i], differs, "in the whole one", "in this one"
                )
                where = two_programs.describe(whole, part, _Rows(size, rows))
                raise AssertionError(
                    "results of examples depend on the batch. In a batch of "
                    f"{name}, {result}, {first.dtype} of shape {first.shape}: "
                    f"{differs.sum()} of {differs.size} elements {text}. {where}"
                )


def _batches(size: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yields batches of the examples: what they are, and which examples."""
    every = np.arange(size)
    yield "all in reverse order", every[::-1]
    yield "the first alone", every[:1]
    yield "the last alone", every[-1:]
    if size > 2:
        yield "all but the first", every[1:]
    yield "all twice", np.concatenate([every, every])


def _run(program: Program) -> list[np.ndarray]:
    outputs = jax.jit(core.jaxpr_as_fun(program.jaxpr))(*program.inputs)
    return [differences.data(x) for x in outputs]


def _check_size(name: str, result: np.ndarray, axis: int, size: int) -> None:
    if result.shape[axis] != size:
        raise ValueError(
            f"{name} has {result.shape[axis]} places along axis {axis} for a batch of "
            f"{size} examples: pass another axis=, or name the arguments that have "
            "examples, argnums=..."
        )


class _Rows:
    """Which elements of values of the whole batch are those of some rows."""

    def __init__(self, size: int, rows: np.ndarray):
        self.size, self.rows = size, rows

    def __call__(
        self, whole: tuple[int, ...], part: tuple[int, ...]
    ) -> Iterator[tuple[tuple[Any, ...], ...]]:
        """Yields the indices, in any reading of the shapes."""
        count = len(self.rows)
        choices = []
        for first, second in zip(whole, part, strict=True):
            every = np.arange(second)
            choices.append([(every, every)] if first == second else [])
            inner = first // self.size
            if first == self.size * inner and second == count * inner:
                for steps in {1, inner}:  # Merged with an axis behind it, or before.
                    rows = np.arange(first).reshape(-1, self.size, steps)
                    choices[-1].append((rows[:, self.rows].ravel(), every))
        yield from two_programs.products(choices)
