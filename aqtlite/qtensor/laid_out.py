"""Stored values laid out as a kernel reads them, in place of an array."""

import abc

import jax
import numpy as np


class LaidOut(abc.ABC):
    """Integers in place of an array as `QTensor.qvalue`.

    Whatever needs an array takes `unpacked`. Subclasses are pytrees.
    """

    dtype: np.dtype
    """Dtype of the integers."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the integers."""

    @property
    def ndim(self) -> int:
        """The rank of the integers."""
        return len(self.shape)

    @abc.abstractmethod
    def integers(self) -> jax.Array:
        """Returns them as int8, in which they are contracted where no kernel reads
        them."""

    def unpacked(self) -> jax.Array:
        """Returns them in their own dtype."""
        return self.integers().astype(self.dtype)
