"""Fractions of log-probabilities that are equal to those of training, bit for bit."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.decoding.subjects import Sizes, Subject

NAMES = {
    "a": "forward in a training step",
    "b": "token by token",
    "c": "by chunks",
    "d": "one sequence alone",
    "e": "a longer cache",
}


def equal(
    subject: Subject, sizes: Sizes, transform: Callable[[Callable], Callable]
) -> Iterator[tuple[str, float]]:
    """Yields the fraction of each comparison, by its letter.

    Args:
        subject: the model.
        sizes: sizes of the data.
        transform: `aqtlite.invariant`, or a function that changes nothing.
    """
    train, decode = transform(subject.train), transform(subject.decode)
    forward, step = jax.jit(train), jax.jit(decode)
    tokens = jax.random.randint(
        jax.random.key(1), (sizes.batch, sizes.length), 0, sizes.vocabulary
    )
    wanted = np.asarray(forward(subject.params, tokens))

    def loss(params: object, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = train(params, tokens)
        chosen = jnp.take_along_axis(out[:, :-1], tokens[:, 1:, None], 2)
        return -chosen.mean(), out

    def decoded(batch: int, chunk: int, size: int) -> np.ndarray:
        kept, found = subject.cache(batch, size), []
        for start in range(0, sizes.length, chunk):
            some = tokens[:batch, start : start + chunk]
            out, kept = step(subject.params, kept, some, np.int32(start))
            found.append(np.asarray(out))
        return np.concatenate(found, 1)

    def fraction(found: np.ndarray) -> float:
        return float((found == wanted[: len(found)]).mean())

    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True, allow_int=True))
    (_, out), _ = gradient(subject.params, tokens)
    yield "a", fraction(np.asarray(out))
    yield "b", fraction(decoded(sizes.batch, 1, sizes.length))
    if subject.takes_chunks:
        yield "c", fraction(decoded(sizes.batch, sizes.chunk, sizes.length))
    alone = np.asarray(forward(subject.params, tokens[:1]))
    both = fraction(alone), fraction(decoded(1, 1, sizes.length))
    yield "d", sum(both) / 2
    yield "e", fraction(decoded(sizes.batch, 1, 2 * sizes.length + 1))
