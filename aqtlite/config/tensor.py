"""Config of one operand of one contraction."""

import dataclasses
from collections.abc import Hashable
from typing import Literal

import jax.numpy as jnp
import numpy as np

from aqtlite import calibration as calibrations
from aqtlite import noise as noises
from aqtlite import numerics as grids
from aqtlite.calibration import scale_grids
from aqtlite.config import representation, scale_dtypes, tensor_checks
from aqtlite.config.blocks import Blocks
from aqtlite.config.rounding import Gptq
from aqtlite.config.sparsity import NofM
from aqtlite.numerics import fields

_FLAGS = ("scale_stop_grad", "po2_scale", "use_fake_quant", "use_fwd_quant", "find_nan")

_TYPES = {
    "calibration": fields.instance(
        calibrations.Calibration,
        "an aqtlite.calibration.Calibration such as AbsMax()",
    ),
    "noise": fields.instance(
        noises.Noise, "an aqtlite.noise.Noise such as CounterHash()"
    ),
    "blocks": fields.instance(Blocks | None, "a config.Blocks or None"),
    "rounding": fields.instance(Gptq | None, "a config.Gptq or None"),
    "sparsity": fields.instance(NofM | None, "a config.NofM or None"),
    **dict.fromkeys(_FLAGS, fields.flag),
}


SharedAxes = tuple[int, ...] | Literal["per_tensor", "remaining"] | None
"""Type of `Tensor.calib_shared_axes`."""


def _shared_axes(axes: object) -> SharedAxes:
    """Normalizes `calib_shared_axes`."""
    if axes is None or axes == "per_tensor" or axes == "remaining":
        return axes
    remedy = (
        'give a tuple of axes, "per_tensor", "remaining", or None for the contracting '
        "axes"
    )
    if isinstance(axes, str):
        raise ValueError(f"calib_shared_axes={axes!r} is not known; {remedy}")
    return tensor_checks.checked_axes(axes, "calib_shared_axes", remedy)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Tensor(representation.CompactRepr):
    """Config of one operand of one contraction; by default left in float.

    >>> from aqtlite import numerics
    >>> Tensor(numerics=numerics.IntSymmetric(bits=4), po2_scale=True)
    Tensor(numerics=IntSymmetric(bits=4), po2_scale=True)
    >>> Tensor().is_quantized
    False

    Raises:
        TypeError: if a field is of another type than declared.
        ValueError: if `calib_shared_axes` is empty, repeats an axis or is an unknown
            string; if `calib_shared_axes` or `noise_shared_axes` is combined with
            `blocks`, `po2_scale` with a contradicting `scale_dtype`, or "remaining"
            with a calibration that has a state or a `scale_dtype` of relative scales;
            if a learned calibration is combined with a grid that reserves stored values
            beyond the range (an `IntAffine` with stochastic rounding); if a
            quantization field is set although nothing is quantized, or
            `noise_shared_axes` although rounding is not stochastic.
    """

    numerics: grids.Numerics | grids.NoNumerics = grids.NoNumerics()
    """Number grid; `NoNumerics` leaves the operand in floating point."""

    calib_shared_axes: SharedAxes = None
    """Axes that share a scale: a tuple (or list) of axes, "per_tensor" for all axes, or
    None for the contracting axes (per-channel). "remaining", in `fwd` only: the
    remaining axes, so that each element of the contracting axes has a scale. It cannot
    be taken out of the sum, and multiplies the other operand before that one is
    quantized (AQT's ``DequantMode.OTHER_INPUT``): of the values of attention, each
    position has a scale of its own, which multiplies the probabilities."""

    scale_stop_grad: bool = True
    """Treat the scale as a constant in gradients. Affects only `aqtlite.quantize`: in
    contractions, the straight-through estimator always does so."""

    calibration: calibrations.Calibration = calibrations.AbsMax()
    """Calibration that finds the range for the grid. Unused without a grid."""

    blocks: Blocks | None = None
    """Sub-channel blocks, each with a scale. None: `calib_shared_axes` determines which
    elements share a scale. Stored integers are contracted block by block, and the block
    sums are scaled and added in float32; floats and tables are dequantized before the
    contraction."""

    po2_scale: bool = False
    """Round the scale up to a power of two."""

    scale_dtype: np.dtype | None = None
    """Dtype to whose values scales are rounded. None: float32. Scales remain float32
    arrays, rounded as follows:

    - bfloat16: up to the next value, so that nothing is clipped;
    - float8_e8m0fnu: with `po2_scale`, up to a power of two, otherwise to that of the
      OCP Microscaling specification (arXiv:2310.10537): the largest power of two in the
      calibrated bound, divided by the largest power of two on the grid. Up to half of
      the values between the former and the next power of two may be clipped;
    - float8_e4m3fn, float8_e5m2, float16: to the nearest value, times a float32 number
      that maps the largest scale to the largest value of the dtype (as in NVFP4); which
      scales share a number is said by `scale_shared_axes`.

    On a grid that rounds stochastically, all of them are rounded up: clipping would
    introduce bias."""

    scale_shared_axes: Literal["per_tensor"] | None = None
    """Axes along which scales of float8_e4m3fn, float8_e5m2 or float16 share their
    float32 number: None for the contracting axes, so that each row has its own, or
    "per_tensor" for all axes."""

    use_fake_quant: bool = False
    """Dequantize before the contraction, which then runs in floating point."""

    use_fwd_quant: bool = False
    """Reuse the stored values of the forward pass in the backward contraction, with the
    scale moved onto the gradient, instead of quantizing the operand again; only in
    `dlhs.rhs` and `drhs.rhs`. The `numerics` of this `Tensor` are then unused. If the
    forward pass used `use_fake_quant`, the reuse is simulated. If the scale varies
    along the forward's contracting axes, as with blocks, the operand is dequantized,
    and quantized again if this `Tensor` has `numerics`; integers in square blocks are
    reused directly."""

    find_nan: bool = False
    """Look for NaN and infinity in all elements even if the calibration does not
    (constants, learned scales, and static ranges once fixed for serving), and make the
    affected rows of the result NaN. Costs a reduction, like a dynamic scale. Without
    it, only the first and last elements of each row are checked. Statistics that are
    still being updated always check all elements."""

    rounding: Gptq | None = None
    """Rounding of weights at conversion, in `fwd.rhs`. None: as in training."""

    sparsity: NofM | None = None
    """Weights set to zero before calibration, only in `fwd.rhs`. None: none."""

    noise: noises.Noise = noises.CounterHash()
    """Source of the noise for stochastic rounding."""

    noise_shared_axes: tuple[int, ...] | None = None
    """Axes along which elements share noise in stochastic rounding, a tuple or list;
    None for none. Each element is still rounded without bias, but errors along these
    axes are not independent."""

    def __post_init__(self) -> None:
        self._check_types()
        object.__setattr__(
            self, "calib_shared_axes", _shared_axes(self.calib_shared_axes)
        )
        self._check_noise_shared_axes()
        object.__setattr__(self, "scale_dtype", scale_dtypes.checked(self.scale_dtype))
        self._check_scales()
        if self.is_quantized:
            self._check_blocks()
            self._check_learned()
            self._check_moving_scale()
            return
        ignored = {
            "calib_shared_axes": self.calib_shared_axes is not None,
            "blocks": self.blocks is not None,
            "scale_dtype": self.scale_dtype is not None,
            "scale_shared_axes": self.scale_shared_axes is not None,
            "po2_scale": self.po2_scale,
            "use_fake_quant": self.use_fake_quant,
            "find_nan": self.find_nan,
            "rounding": self.rounding is not None,
            "sparsity": self.sparsity is not None,
        }
        for name, is_set in ignored.items():
            if is_set:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} would have no effect, because "
                    "numerics is NoNumerics() and nothing is quantized; set numerics, "
                    f"or leave {name} at its default"
                )

    def _check_noise_shared_axes(self) -> None:
        if self.noise_shared_axes is None:
            return
        remedy = "give a tuple of axes, or None for noise of each element's own"
        axes = tensor_checks.checked_axes(
            self.noise_shared_axes, "noise_shared_axes", remedy
        )
        object.__setattr__(self, "noise_shared_axes", axes)
        if not self.needs_noise:
            raise ValueError(
                f"noise_shared_axes={axes} would have no effect, because rounding is "
                "to the nearest value; set numerics to a grid with "
                "stochastic_rounding=True, or leave noise_shared_axes None"
            )

    def _check_types(self) -> None:
        if not isinstance(self.numerics, grids.Numerics | grids.NoNumerics):
            raise TypeError(
                "numerics must be an aqtlite.numerics.Numerics such as "
                f"IntSymmetric(bits=8), or NoNumerics(), got {self.numerics!r}"
                f"{tensor_checks.grid_of_name(self.numerics)}"
            )
        for name, check in _TYPES.items():
            check(getattr(self, name), name)
        if isinstance(self.numerics, grids.Numerics):
            tensor_checks.check_grid(self.numerics)
        if not isinstance(self.noise, Hashable):
            raise TypeError(
                f"noise: {type(self.noise).__name__} must be a frozen dataclass, so "
                "that configs can be compared and hashed; decorate it with "
                "@dataclasses.dataclass(frozen=True)"
            )

    def _check_scales(self) -> None:
        scale_dtypes.check_shared_axes(
            self.scale_shared_axes,
            self.scale_dtype,
            has_one_per_row=self.blocks is None and self.calib_shared_axes is None,
            is_quantized=self.is_quantized,
        )
        if self.po2_scale and self.scale_dtype not in (None, jnp.float8_e8m0fnu):
            raise ValueError(
                f"po2_scale=True makes scales powers of two, and scale_dtype="
                f"{np.dtype(self.scale_dtype).name!r} rounds them otherwise; leave one "
                "of them at its default, or set scale_dtype='float8_e8m0fnu'"
            )

    def _check_blocks(self) -> None:
        if self.blocks is None:
            return
        if self.calib_shared_axes is not None:
            raise ValueError(
                f"blocks={self.blocks!r} and calib_shared_axes="
                f"{self.calib_shared_axes!r} both say what shares a scale; leave one "
                "of them None"
            )
        if self.noise_shared_axes is not None:
            raise ValueError(
                f"blocks={self.blocks!r} and noise_shared_axes="
                f"{self.noise_shared_axes!r}: noise that axes share is not available "
                "for blocks; leave one of them None"
            )
        if self.blocks.pad and not self.calibration.ignores_zeros:
            raise ValueError(
                f"blocks={self.blocks!r} with calibration={self.calibration!r}: zeros "
                "that pad a block would change its scale. Use calibration.AbsMax(), "
                "calibration.MinMax() or calibration.Constant(...), or "
                "Blocks(fit=True)"
            )
        if self.calibration.has_state:
            raise ValueError(
                f"blocks={self.blocks!r} with calibration={self.calibration!r}, which "
                "gathers statistics: blocks have none. Use a calibration that looks at "
                "the array alone, such as calibration.AbsMax(), or leave blocks None"
            )

    def _check_learned(self) -> None:
        grid = self.grid
        if self.calibration.is_learned and (
            grid.calibrated_range != grid.zero_point_range
        ):
            raise ValueError(
                f"calibration={self.calibration!r} is learned, and its step is a scale "
                f"of the stored values {grid.zero_point_range}, but numerics={grid!r} "
                f"maps ranges onto {grid.calibrated_range}; set "
                "stochastic_rounding=False, or use a grid without a zero point, such "
                "as numerics.IntSymmetric(bits=8, stochastic_rounding=True)"
            )

    def _check_moving_scale(self) -> None:
        if not self.scale_moves:
            return
        if self.calibration.has_state or self.calibration.is_learned:
            raise ValueError(
                f"calib_shared_axes='remaining' with calibration={self.calibration!r}: "
                "each contracted element has a scale, found from the array alone. Use "
                "calibration.AbsMax(), for instance, or calib_shared_axes='per_tensor'"
            )
        if self.scale_dtype is not None and self.has_relative_scales:
            raise ValueError(
                f"calib_shared_axes='remaining' with scale_dtype="
                f"{self.scale_dtype.name!r}, which rounds scales relative to the "
                "largest one: they would depend on one another. Use 'bfloat16', "
                "'float8_e8m0fnu' or None"
            )

    @property
    def has_relative_scales(self) -> bool:
        """True if several scales share a float32 number, which the largest one sets."""
        dtype = self.scale_dtype
        return dtype is not None and dtype.name in scale_grids.RELATIVE_DTYPES

    @property
    def scale_moves(self) -> bool:
        """True if the scale multiplies the other operand, not the result."""
        return self.calib_shared_axes == "remaining"

    @property
    def is_quantized(self) -> bool:
        """True if the operand has a grid."""
        return not isinstance(self.numerics, grids.NoNumerics)

    @property
    def gathers_statistics(self) -> bool:
        """True if the scale comes from statistics over several batches."""
        return self.is_quantized and self.calibration.has_state

    @property
    def is_learned(self) -> bool:
        """True if the scale is trained."""
        return self.is_quantized and self.calibration.is_learned

    @property
    def is_integer(self) -> bool:
        """True if the stored values are contracted as integers."""
        if isinstance(self.numerics, grids.NoNumerics) or self.use_fake_quant:
            return False
        return self.numerics.arithmetic == "integer"

    @property
    def grid(self) -> grids.Numerics:
        """The grid of a quantized operand.

        Raises:
            ValueError: if the operand is not quantized.
        """
        if isinstance(self.numerics, grids.NoNumerics):
            raise ValueError(
                "numerics is NoNumerics(), which has no integers; give a grid such as "
                "numerics.IntSymmetric(bits=8)"
            )
        return self.numerics

    @property
    def needs_noise(self) -> bool:
        """True if rounding is stochastic."""
        return isinstance(self.numerics, grids.Numerics) and self.numerics.needs_noise

    def to_nearest(self) -> "Tensor":
        """A copy of the config with rounding to nearest."""
        if not self.needs_noise:
            return self
        nearest = self.grid.to_nearest()
        return dataclasses.replace(self, numerics=nearest, noise_shared_axes=None)
