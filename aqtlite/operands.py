"""One operand of a contraction: quantized, and as the dot takes it."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import config, noise, quantizer
from aqtlite import dimension_numbers as dn
from aqtlite.lowering import exact
from aqtlite.qtensor import QTensor

Operand = jax.Array | QTensor


class Noise(NamedTuple):
    """What seeds the noise of one operand."""

    seed: jax.Array | None
    forward_scales: tuple[jax.Array, ...]
    salt: int

    def of_channels(self, bound: jax.Array) -> jax.Array:
        """The seed of each channel of an operand with these bounds."""
        seed = self.seed
        if seed is None:
            local = [
                scale
                for scale in self.forward_scales
                if all(map(_is_broadcast, scale.shape, bound.shape))
            ]
            seed = noise.seed_from_bounds(bound, *local)
        return noise.fold_in(seed, self.salt)


_NO_NOISE = Noise(None, (), 0)


def _is_broadcast(size: int, wanted: int) -> bool:
    """Whether an axis of this size, which may be symbolic, broadcasts to another."""
    return size in (1, wanted)


def quantize(
    x: Operand,
    tensor: config.Tensor,
    contracting: dn.Axes,
    path: str,
    noise_of: Noise = _NO_NOISE,
) -> QTensor | None:
    """The integers of one operand, or None if it stays in floating point."""
    if isinstance(x, QTensor):
        _check_scale(x.scale.shape, tensor, contracting, path)
        return x
    if not tensor.is_quantized:
        return None
    bound, scale = quantizer.calibrate(x, tensor, contracting, path)
    _check_scale(scale.shape, tensor, contracting, path)
    seed = noise_of.of_channels(bound) if tensor.needs_noise else None
    q = quantizer.round_to_grid(x, scale, tensor, seed)
    if path.startswith("fwd"):
        q = dataclasses.replace(q, scale=exact.materialized(scale))
    return q


def _check_scale(
    scale_shape: tuple[int, ...],
    tensor: config.Tensor,
    contracting: dn.Axes,
    path: str,
) -> None:
    varying = [axis for axis in contracting if scale_shape[axis] != 1]
    if varying and not tensor.use_fake_quant:
        raise ValueError(
            f"{path}.calib_shared_axes={tensor.calib_shared_axes} leaves a scale of "
            f"shape {scale_shape} that varies along the contracting axes {varying}: "
            "it cannot be taken out of the sum. Share the scale along them too, or "
            f"set {path}.use_fake_quant=True"
        )


def largest_stored(tensor: config.Tensor) -> int | None:
    """The largest magnitude of an operand's integers, None if it has none."""
    return tensor.grid.largest_stored if tensor.is_quantized else None


def dot_input(
    x: Operand, q: QTensor | None, tensor: config.Tensor, in_dtype: np.dtype | None
) -> jax.Array:
    """What the dot takes of an operand: its integers, or floats."""
    if q is not None and not tensor.use_fake_quant:
        return q.qvalue
    if q is not None:
        # Given or made here, it is contracted as the same array.
        wide = dataclasses.replace(q, dtype=wide_dtype(q.dtype))
        values = exact.materialized(wide.dequant())
    else:
        values = jnp.asarray(x)
    return values if in_dtype is None else values.astype(in_dtype)


def wide_dtype(dtype: np.dtype) -> np.dtype:
    """float32, or float64 for float64."""
    return np.dtype("float64") if dtype == np.float64 else np.dtype("float32")
