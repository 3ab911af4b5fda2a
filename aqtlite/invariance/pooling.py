"""The gradient of max pooling, in a fixed order."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering.target import TargetDependent


@dataclasses.dataclass(frozen=True)
class ScatteredToChosen(TargetDependent):
    """Adds elements to the one that was chosen from the window of each, in float32.

    The first of equal elements is chosen, as by `jax.lax.reduce_window_max` or its
    counterpart. An element that several windows chose gets the sum of theirs, by its
    place in the window, from the first place on.
    """

    is_max: bool
    """Whether the largest element was chosen; else the smallest."""

    window_dimensions: tuple[int, ...]
    window_strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]

    def reference(self, source, operand):
        """The transpose of pooling's derivative."""
        pool = lax.max if self.is_max else lax.min

        def pooled(x):
            options = self.window_dimensions, self.window_strides, self.padding
            return lax.reduce_window(x, self._outside, pool, *options)

        return jax.vjp(pooled, operand)[1](source)[0]

    @property
    def _outside(self):
        return np.float32(-np.inf if self.is_max else np.inf)

    def lowered(self, target, source, operand):
        del target
        padded = lax.pad(operand, self._outside, [(*one, 0) for one in self.padding])
        spans = [
            (size - 1) * stride + 1
            for size, stride in zip(source.shape, self.window_strides, strict=True)
        ]
        starts = list(np.ndindex(*self.window_dimensions))
        slices = [
            lax.slice(padded, start, np.add(start, spans).tolist(), self.window_strides)
            for start in starts
        ]
        best, chosen = slices[0], jnp.zeros(source.shape, jnp.int32)
        for number, x in enumerate(slices[1:], 1):
            is_kept = best >= x if self.is_max else best <= x
            best = lax.select(is_kept, best, x)
            chosen = lax.select(is_kept, chosen, jnp.full_like(chosen, number))
        out = jnp.zeros(padded.shape, jnp.float32)
        for number, start in enumerate(starts):
            part = jnp.where(chosen == number, source, np.float32(0))
            ends = np.subtract(padded.shape, np.add(start, spans))
            steps = np.subtract(self.window_strides, 1)
            amounts = zip(start, ends.tolist(), steps.tolist(), strict=True)
            out = out + lax.pad(part, np.float32(0), list(amounts))
        # Negative amounts cut the padding off.
        return lax.pad(
            out, np.float32(0), [(-low, -high, 0) for low, high in self.padding]
        )
