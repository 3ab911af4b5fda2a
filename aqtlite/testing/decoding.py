"""Decoding with a cache that gives the bits of training."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.program.modules import flax_models
from aqtlite.shapes.sharding import describe as type_of
from aqtlite.testing import differences, two_programs
from aqtlite.testing.two_programs import Program


def assert_decoded_equals_trained(
    train: Callable[[Any, jax.Array], jax.Array],
    decode: Callable[[Any, Any, jax.Array, jax.Array], tuple[jax.Array, Any]],
    params: Any,
    tokens: Any,
    cache: Callable[[int], Any],
    *,
    chunks: Sequence[int] = (1, 3, 0),
) -> None:
    """Asserts that decoding with a cache gives the log-probabilities of training.

    Compares log-probabilities of all tokens, bit for bit: of the forward over whole
    sequences, of the same forward where its gradient is taken, and of decoding by
    chunks of several lengths, for all sequences and for the first alone.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> table = jax.random.normal(jax.random.key(0), (7, 7))
    >>> def train(table, tokens):
    ...     return jax.nn.log_softmax(jnp.cumsum(table[tokens], 1))
    >>> def decode(table, kept, tokens, start):
    ...     sums = kept[:, None] + jnp.cumsum(table[tokens], 1)
    ...     return jax.nn.log_softmax(sums), sums[:, -1]
    >>> tokens = jnp.arange(10).reshape(2, 5) % 7
    >>> zeros = lambda batch: jnp.zeros((batch, 7))
    >>> assert_decoded_equals_trained(train, decode, jnp.round(table), tokens, zeros)
    >>> wrong = lambda *args: decode(*args[:3], 0)[:1] + (args[1],)
    >>> assert_decoded_equals_trained(train, wrong, table, tokens, zeros)
    Traceback (most recent call last):
    ...
    AssertionError: decoding differs from training. ...

    Args:
        train: function ``(params, tokens)`` of the training forward, that returns
            log-probabilities (or logits), ``(batch, length, vocabulary)``. Both
            functions run under `jax.jit`.
        decode: function ``(params, cache, tokens, start)`` of a step, that returns the
            log-probabilities ``(batch, count, vocabulary)`` of `tokens`,
            ``(batch, count)``, which stand at the positions from `start` (int32 scalar)
            on, and the updated cache. It may convert `params` for serving first.
        params: pytree of parameters. The gradient is with respect to its floats.
        tokens: integers, ``(batch, length)``.
        cache: function of the number of sequences, that returns an empty cache for
            sequences of this length.
        chunks: numbers of tokens that a step takes; 0 for all at once. Linen's own
            cache takes ``(1,)``.

    Raises:
        AssertionError: if log-probabilities differ; the message names the way of
            decoding, the first position, by how much, and the first equation, by path,
            whose result does.
        TypeError: if `tokens` are no integers, or `cache` is no function.
        ValueError: if shapes or chunks are others, or `params` holds no floats.
    """
    tokens = jnp.asarray(tokens)
    _check(tokens, cache, chunks)
    batch, length = tokens.shape
    forward, step = jax.jit(train), jax.jit(decode)
    wanted = forward(params, tokens)
    _check_shape("train", wanted, tokens.shape, None)

    def compare(found: Any, what: str, call: _Call, overlaps: _Decoded) -> None:
        count, start, stop = overlaps.count, overlaps.start, overlaps.stop
        first, other = (
            differences.data(one) for one in (wanted[:count, start:stop], found)
        )
        differs = differences.differing(first, other)
        if differs.any():
            text = differences.describe(first, other, differs, "trained", "there")
            whole = _traced(train, (params, tokens))
            where = two_programs.describe(whole, _traced(*call), overlaps)
            raise AssertionError(
                f"{what}, log-probabilities at positions {start} to {stop - 1}, "
                f"{first.dtype} of shape {first.shape}: {differs.sum()} of "
                f"{differs.size} elements {text}. {where}"
            )

    gradient, floats = _with_gradient(train, params)
    compare(
        jax.jit(gradient)(floats, tokens),
        "the forward is another one where its gradient is taken: there",
        (gradient, (floats, tokens)),
        _Decoded(tokens.shape, batch, 0, length),
    )
    for count in dict.fromkeys((batch, 1)):
        for size in dict.fromkeys(min(one or length, length) for one in chunks):
            kept = cache(count)
            for start in range(0, length, size):
                some = tokens[:count, start : start + size]
                args = (params, kept, some, np.int32(start))
                found, kept = _unpacked(step(*args))
                stop = start + some.shape[1]
                _check_shape("decode", found, some.shape, wanted)
                compare(
                    found,
                    f"decoding differs from training. By {size} of {length} tokens at "
                    f"once, with {count} of {batch} sequences",
                    (decode, args),
                    _Decoded(tokens.shape, count, start, stop),
                )


_Call = tuple[Callable[..., Any], tuple[Any, ...]]


def _traced(fn: Callable[..., Any], args: tuple[Any, ...]) -> Program:
    traced = flax_models.trace(fn, args)
    return Program(traced.jaxpr, [jnp.asarray(x) for x in traced.values(args)])


def _with_gradient(
    train: Callable[..., Any], params: Any
) -> tuple[Callable[..., Any], list[jax.Array]]:
    """Returns the forward of a step that takes a gradient, and the floats in `params`.

    Raises:
        ValueError: if there are none.
    """
    leaves, treedef = jax.tree.flatten(params)
    is_float = [jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in leaves]
    if not any(is_float):
        raise ValueError(
            "params holds no floats, so nothing is trained: pass the parameters, and "
            "convert them for serving in `decode`"
        )

    def loss(floats: list[jax.Array], tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        given = iter(floats)
        filled = [
            next(given) if one else x for x, one in zip(leaves, is_float, strict=True)
        ]
        out = train(jax.tree.unflatten(treedef, filled), tokens)
        chosen = jnp.take_along_axis(out[:, :-1], tokens[:, 1:, None], 2)
        return -chosen.mean(), out

    def gradient(floats: list[jax.Array], tokens: jax.Array) -> Any:
        (_, out), gradients = jax.value_and_grad(loss, has_aux=True)(floats, tokens)
        # Were they no results, nothing would compute them.
        return jax.lax.optimization_barrier((out, gradients))[0]

    return gradient, [x for x, one in zip(leaves, is_float, strict=True) if one]


def _check(tokens: jax.Array, cache: Any, chunks: Sequence[int]) -> None:
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"tokens are {type_of(tokens)}: pass integers (batch, length)")
    if tokens.shape[0] < 1 or tokens.shape[1] < 2:
        raise ValueError(
            f"tokens are {type_of(tokens)}: the comparison needs at least one sequence "
            "of two tokens"
        )
    if not callable(cache):
        raise TypeError(
            "cache is no function: pass one that makes an empty cache for a number of "
            "sequences, such as lambda batch: jax.tree.map(jnp.zeros_like, ...)"
        )
    if not chunks or any(one < 0 for one in chunks):
        raise ValueError(
            f"chunks={chunks!r}: pass numbers of tokens that a step takes, such as "
            "(1, 3, 0), where 0 is all of them"
        )


def _check_shape(
    name: str, found: Any, shape: tuple[int, ...], like: jax.Array | None
) -> None:
    """Checks log-probabilities.

    Args:
        name: the function that returned them.
        found: what it returned.
        shape: batch and length.
        like: those of training, that have the same vocabulary and dtype.

    Raises:
        ValueError: if they have another shape or dtype.
    """
    wanted = f"{shape} and the vocabulary"
    is_right = hasattr(found, "dtype") and found.ndim == 3 and found.shape[:2] == shape
    if is_right and like is not None:
        wanted = f"{like.dtype} of {(*shape, like.shape[2])}, as train returns"
        is_right = (found.dtype, found.shape[2]) == (like.dtype, like.shape[2])
    if not is_right:
        raise ValueError(
            f"{name} returned {type_of(found)}, where log-probabilities have {wanted}"
        )


def _unpacked(result: Any) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"decode returned {type(result).__name__}: it has to return "
            "log-probabilities and the updated cache"
        )
    return result


class _Decoded:
    """Which elements of values of training are those of a step with a cache.

    Axes of a value in training are the batch, of which the first sequences are
    decoded; the positions, of which some are; or the slots that they attend to, of
    which those before the end of the step are filled.
    """

    def __init__(self, shape: tuple[int, ...], count: int, start: int, stop: int):
        self.batch, self.length = shape
        self.count, self.start, self.stop = count, start, stop

    def __call__(
        self, whole: tuple[int, ...], part: tuple[int, ...]
    ) -> Iterator[tuple[tuple[Any, ...], ...]]:
        """Yields the indices, in any reading of the shapes."""
        choices = []
        here, filled = np.arange(self.start, self.stop), np.arange(self.stop)
        for first, second in zip(whole, part, strict=True):
            every = np.arange(second)
            readings = [(every, every)] if first == second else []
            if (first, second) == (self.batch, self.count):
                readings.append((every, every))
            if (first, second) == (self.length, self.stop - self.start):
                readings.append((here, every))
            if first == self.length and second >= self.stop:
                readings.append((filled, filled))
            merged = self.batch * self.length, self.count * (self.stop - self.start)
            if (first, second) == merged:
                rows = np.arange(first).reshape(self.batch, self.length)
                readings.append((rows[: self.count, here].ravel(), every))
            choices.append(readings)
        yield from two_programs.products(choices)
