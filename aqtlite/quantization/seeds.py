"""The origin of the seeds of noise: a key, or the operand itself."""

from typing import NamedTuple

import jax

from aqtlite import noise


class Seeds(NamedTuple):
    """The origin of the seeds of one operand's noise."""

    seed: jax.Array | None = None
    """uint32 of shape ``(2,)``; None seeds each channel from its calibration."""

    forward_scales: tuple[jax.Array, ...] = ()
    """Further arrays to seed channels from, of the rank of the operand."""

    salt: int | None = None
    """Number that gives each operand its own noise; None for an array on its own."""

    def of_channels(self, found: tuple[jax.Array, ...]) -> jax.Array:
        """Returns the seeds of channels with these bounds (`Calibrated.found`)."""
        if self.seed is None:
            local = []
            for scale in self.forward_scales:
                pairs = zip(scale.shape, found[0].shape, strict=True)
                if all(size in (1, wanted) for size, wanted in pairs):
                    local.append(scale)
            return noise.seed_from_bounds(*found, *local, salt=self.salt)
        return self.seed if self.salt is None else noise.fold_in(self.seed, self.salt)
