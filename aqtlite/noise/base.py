"""The interface of a source of noise."""

import abc

import jax


class Noise(abc.ABC):
    """A source of random bits for stochastic rounding.

    A source is a function of a seed: a seed gives the same bits in every program, so
    that an array that is recomputed (`jax.checkpoint`) is rounded as before.

    Subclasses are frozen dataclasses. Register one with `aqtlite.config.register` to
    write it as JSON and into checkpoints.
    """

    @abc.abstractmethod
    def bits(self, shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
        """Returns uniform, independent random bits.

        Args:
            shape: shape of the array to be rounded, with size 1 along axes that share
                noise.
            seed: uint32 of shape ``(2,)``, or ``(2, *channels)`` with one seed for each
                channel, where `channels` has the rank of `shape` and broadcasts to it.
                Seeds of channels differ, but may be similar numbers.

        Returns:
            uint32 of `shape`.
        """
