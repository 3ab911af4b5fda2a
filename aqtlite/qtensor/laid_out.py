"""Stored values laid out in another way than an array, as a kernel reads them."""

import abc

import jax
import numpy as np


class LaidOut(abc.ABC):
    """Stored values in place of an array as `QTensor.qvalue`.

    Whatever needs an array takes `unpacked`. Subclasses are pytrees.
    """

    dtype: np.dtype
    """Dtype of the values."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""

    @property
    def ndim(self) -> int:
        """The rank of the values."""
        return len(self.shape)

    @abc.abstractmethod
    def unpacked(self) -> jax.Array:
        """Returns the values in their own dtype."""


class PackedIntegers(LaidOut):
    """Integers that are packed for a kernel."""

    @abc.abstractmethod
    def integers(self) -> jax.Array:
        """Returns them as int8, in which they are contracted where no kernel reads
        them."""

    def unpacked(self) -> jax.Array:
        return self.integers().astype(self.dtype)
