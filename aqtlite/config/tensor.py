"""Config of one operand of one contraction.

Before: the pictures of docs/architecture.md, whose fifteen files begin here.
Next: `config/dot_general.py`, a `Tensor` for each operand of a contraction.
"""

import dataclasses
from typing import Literal

import numpy as np

from aqtlite import calibration as calibrations
from aqtlite import noise as noises
from aqtlite import numerics as grids
from aqtlite.calibration import scale_grids
from aqtlite.config import representation, tensor_checks
from aqtlite.config.blocks import Blocks
from aqtlite.config.double_scales import DoubleScales
from aqtlite.config.rounding import Gptq
from aqtlite.config.sparsity import NofM

SharedAxes = tuple[int, ...] | Literal["per_tensor", "remaining"] | None
"""Type of `Tensor.calib_shared_axes`."""


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
    """Calibration that finds the range for the grid. Unused without a grid. One of your
    own is a frozen dataclass derived from `calibration.Calibration`, and finds a bound
    with `bound`, or a range with `range`."""

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

    double_scales: DoubleScales | None = None
    """How a conversion holds the scales of weights in 8 bits, only in `fwd.rhs`. None:
    in float32."""

    sparsity: NofM | None = None
    """Weights set to zero before calibration, only in `fwd.rhs`. None: none."""

    noise: noises.Noise = noises.CounterHash()
    """Source of the noise for stochastic rounding."""

    noise_shared_axes: tuple[int, ...] | None = None
    """Axes along which elements share noise in stochastic rounding, a tuple or list;
    None for none. Each element is still rounded without bias, but errors along these
    axes are not independent."""

    def __post_init__(self) -> None:
        tensor_checks.check_types(self)
        for name, value in tensor_checks.normalized(self).items():
            object.__setattr__(self, name, value)
        tensor_checks.check_combinations(self)

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
