"""Configs of a contraction and the contractions for both gradients.

Before: `config/tensor.py`, how one operand is quantized.
Next: `contraction/dot_general.py`, a function made of such a config.
"""

import dataclasses
from typing import Any

import numpy as np

from aqtlite.config import field_checks, representation
from aqtlite.config.blocks import LocalAqt
from aqtlite.config.rotation import Hadamard
from aqtlite.config.smoothing import Smoothing
from aqtlite.config.tensor import Tensor
from aqtlite.numerics import Numerics, fields

_IS_TENSOR = fields.instance(Tensor, "a config.Tensor")

_BACKWARD = ("dlhs.lhs", "dlhs.rhs", "drhs.lhs", "drhs.rhs")

# Above the classes, because a default such as `DotGeneralRaw()` is validated while the
# classes are being defined.


def _at(cfg: Any, path: str) -> Any:
    for name in path.split("."):
        cfg = getattr(cfg, name)
    return cfg


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class DotGeneralRaw(representation.CompactRepr):
    """Config of one contraction: the forward, or one of the two backward ones.

    >>> from aqtlite import numerics
    >>> int8 = Tensor(numerics=numerics.IntSymmetric(bits=8))
    >>> DotGeneralRaw(lhs=int8, rhs=int8, dg_accumulator_dtype="int32")
    DotGeneralRaw(
        lhs=Tensor(numerics=IntSymmetric(bits=8)),
        rhs=Tensor(numerics=IntSymmetric(bits=8)),
        dg_accumulator_dtype='int32',
    )

    Raises:
        TypeError: if a field is of another type than declared.
        ValueError: if a dtype is of the wrong kind, if an integer accumulator is set
            for operands that are not contracted as integers, if `local_aqt` is combined
            with `calib_shared_axes` or quantizes nothing, if `lhs` has
            `use_fwd_quant`, if `smoothing` or `rotation` is set and nothing is
            quantized, or if `rotation` is set and `rhs` has `use_fwd_quant`.
    """

    lhs: Tensor = Tensor()
    """Left operand; the output gradient in `dlhs` and `drhs`."""

    rhs: Tensor = Tensor()
    """Right operand; the forward's rhs in `dlhs`, and the forward's lhs in `drhs`."""

    dg_in_dtype: np.dtype | None = None
    """Floating dtype to which operands are cast for the contraction; any dtype-like.
    None: stored integers are contracted without a cast. CPUs contract two integer
    operands as integers in any case, for the exact sums that floats approximate."""

    dg_accumulator_dtype: np.dtype | None = None
    """Dtype of the contraction's result before scales are applied; any dtype-like.
    None: int32 for two integer operands, float32 otherwise. Sums of integers of up to
    8 bits that could overflow int32 are exact and rounded once to float32. TPUs
    exchange partial sums in this dtype: bfloat16 takes half of int32's bytes, and is
    not exact. On GPUs, products of bfloat16 or fp8 write bfloat16 themselves, as those
    of bfloat16 layers do: sums in float32, rounded once, and equal to other platforms'
    up to the order of the sums and one unit of bfloat16. Sums of int8 are rounded there
    as they are scaled, since cuBLASLt writes int32, or in the product by Triton."""

    local_aqt: LocalAqt | None = None
    """Sub-channel tiles, in `dlhs` and `drhs` only. None: none."""

    smoothing: Smoothing | None = None
    """Scales along the contracting axes, moved from lhs to rhs before quantization, in
    `fwd` only. None: none."""

    rotation: Hadamard | None = None
    """Rotation of both operands along the contracting axes, before quantization and
    after smoothing. The gradients of `fwd` are contractions of the rotated operands,
    and are rotated back. None: none."""

    def __post_init__(self) -> None:
        for side in ("lhs", "rhs"):
            _IS_TENSOR(getattr(self, side), side)
        for name in ("dg_in_dtype", "dg_accumulator_dtype"):
            object.__setattr__(
                self, name, field_checks.as_dtype(name, getattr(self, name))
            )
        local, what = LocalAqt | None, "a config.LocalAqt or None"
        fields.instance(local, what)(self.local_aqt, "local_aqt")
        smoothing, what = Smoothing | None, "a config.Smoothing or None"
        fields.instance(smoothing, what)(self.smoothing, "smoothing")
        rotation, what = Hadamard | None, "a config.Hadamard or None"
        fields.instance(rotation, what)(self.rotation, "rotation")
        is_quantized = self.lhs.is_quantized or self.rhs.is_quantized
        for name in ("smoothing", "rotation"):
            if getattr(self, name) is not None and not is_quantized:
                raise ValueError(
                    f"{name} would have no effect, because neither lhs nor rhs is "
                    "quantized here; set lhs.numerics or rhs.numerics, or leave "
                    f"{name} None"
                )
        if self.rotation is not None and self.rhs.use_fwd_quant:
            raise ValueError(
                "rhs.use_fwd_quant=True takes the forward's integers, which cannot be "
                "rotated; set rhs.use_fwd_quant=False, or leave rotation None"
            )
        if self.lhs.use_fwd_quant:
            raise ValueError(field_checks.misplaced_use_fwd_quant("lhs"))
        field_checks.check_dtypes(self)
        field_checks.check_local_aqt(self)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._key() == other._key()

    def _key(self) -> tuple[Any, ...]:
        # Dtypes by name: in NumPy, np.dtype("float64") == None.
        in_dtype, accumulator = (
            None if dtype is None else dtype.name
            for dtype in (self.dg_in_dtype, self.dg_accumulator_dtype)
        )
        others = self.local_aqt, self.smoothing, self.rotation
        return self.lhs, self.rhs, in_dtype, accumulator, *others

    @property
    def is_prepared(self) -> bool:
        """True if operands change before they are quantized."""
        changes = self.smoothing, self.rotation, self.rhs.sparsity
        return any(one is not None for one in changes)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class DotGeneral(representation.CompactRepr, representation.NoFunction):
    """Config of a contraction and both gradients; by default nothing is quantized.

    In `dlhs`, `lhs` is the output gradient and `rhs` the forward's rhs. In `drhs`,
    `lhs` is the output gradient and `rhs` the forward's *lhs*. (This is the convention
    of Google's AQT.)

    >>> from aqtlite import numerics
    >>> int8 = Tensor(numerics=numerics.IntSymmetric(bits=8))
    >>> cfg = DotGeneral(fwd=DotGeneralRaw(rhs=int8))
    >>> cfg.is_quantized, DotGeneral().is_quantized
    (True, False)
    >>> DotGeneral(dlhs=DotGeneralRaw(rhs=Tensor(use_fwd_quant=True)))
    Traceback (most recent call last):
    ...
    ValueError: dlhs.rhs.use_fwd_quant=True takes the forward's integers, but fwd.rhs \
is not quantized; set fwd.rhs.numerics, or dlhs.rhs.use_fwd_quant=False

    Raises:
        TypeError: if a field is of another type than declared.
        ValueError: if `use_fwd_quant` is set where the forward quantizes nothing, if
            `fwd.local_aqt`, `dlhs.smoothing` or `drhs.smoothing` is set, if a grid in
            `fwd` rounds stochastically and cannot round to nearest, as serving does, if
            a calibration has state where none is kept, if an int32 accumulator is set
            for a float operand, if `out` rounds stochastically, or if
            ``calib_shared_axes="remaining"`` is set for both operands of `fwd` or
            outside of it.
    """

    fwd: DotGeneralRaw = DotGeneralRaw()
    """Forward contraction."""

    dlhs: DotGeneralRaw = DotGeneralRaw()
    """Contraction that computes the gradient of the lhs."""

    drhs: DotGeneralRaw = DotGeneralRaw()
    """Contraction that computes the gradient of the rhs."""

    out: Tensor = Tensor()
    """Result of `fwd`, by default left in float. With `numerics`, the contraction
    quantizes the result and returns a `QTensor`, whose integers a following contraction
    takes directly; with `use_fake_quant`, the dequantized array. `calib_shared_axes`
    refers to axes of the result (in an einsum, of the equation's output). None: the
    last axis shares a scale, so that each row has one; `blocks` split that axis."""

    def __post_init__(self) -> None:
        is_raw = fields.instance(DotGeneralRaw, "a config.DotGeneralRaw")
        for name in ("fwd", "dlhs", "drhs"):
            is_raw(getattr(self, name), name)
        self._check_out()
        if self.fwd.rhs.use_fwd_quant:
            raise ValueError(field_checks.misplaced_use_fwd_quant("fwd.rhs"))
        if self.fwd.local_aqt is not None:
            raise ValueError(
                "fwd.local_aqt: sub-channel tiles in the forward contraction are not "
                "available; only dlhs and drhs take local_aqt"
            )
        for path in ("dlhs", "drhs"):
            if _at(self, path).smoothing is not None:
                raise ValueError(
                    f"{path}.smoothing: gradients have no smoothing of their own; what "
                    "the forward contraction smoothed stays so in them. Set "
                    f"fwd.smoothing, and leave {path}.smoothing None"
                )
        self._check_weights()
        for path in ("fwd.lhs", "fwd.rhs"):
            tensor = _at(self, path)
            if (
                tensor.needs_noise
                and type(tensor.grid).to_nearest is Numerics.to_nearest
            ):
                name = type(tensor.grid).__name__
                raise ValueError(
                    f"{path}.numerics: {name} rounds stochastically and does not "
                    "override to_nearest(), by which frozen weights and served "
                    f"activations are rounded; override {name}.to_nearest, or use the "
                    "grid for gradients alone (dlhs and drhs)"
                )
        for path in _BACKWARD:
            field_checks.check_backward_calibration(path, _at(self, path))
        for path in (*_BACKWARD, "out"):
            field_checks.check_no_moving_scale(path, _at(self, path))
        if self.fwd.lhs.scale_moves and self.fwd.rhs.scale_moves:
            raise ValueError(
                "fwd.lhs and fwd.rhs both have calib_shared_axes='remaining': the "
                "scale of one operand multiplies the other before that is quantized, "
                "so that only one of them can have it. Leave the other's None"
            )
        self._check_reuse("dlhs", forward_side="rhs")
        self._check_reuse("drhs", forward_side="lhs")

    def _check_weights(self) -> None:
        """Checks what is for weights alone."""
        for path in ("fwd.lhs", *_BACKWARD, "out"):
            if _at(self, path).double_scales is not None:
                raise ValueError(
                    f"{path}.double_scales={_at(self, path).double_scales!r} would "
                    "have no effect: only scales of frozen weights, which are fwd.rhs, "
                    "are held in 8 bits. Set fwd.rhs.double_scales, and leave "
                    f"{path}.double_scales None"
                )
            if _at(self, path).sparsity is not None:
                raise ValueError(
                    f"{path}.sparsity={_at(self, path).sparsity!r}: only weights, "
                    "which are fwd.rhs, are pruned, and gradients take them so. Set "
                    f"fwd.rhs.sparsity, and leave {path}.sparsity None"
                )
            if _at(self, path).rounding is not None:
                raise ValueError(
                    f"{path}.rounding={_at(self, path).rounding!r} would have no "
                    "effect: only frozen weights, which are fwd.rhs, are rounded at "
                    f"conversion. Set fwd.rhs.rounding, and leave {path}.rounding None"
                )
        if self.fwd.rhs.rounding is not None and self.fwd.smoothing is not None:
            raise ValueError(
                f"fwd.rhs.rounding={self.fwd.rhs.rounding!r} and fwd.smoothing: the "
                "statistics of the inputs would be those before smoothing; leave one "
                "of the two None"
            )

    def _check_out(self) -> None:
        _IS_TENSOR(self.out, "out")
        if self.out.use_fwd_quant:
            raise ValueError(field_checks.misplaced_use_fwd_quant("out"))
        if self.out.needs_noise:
            raise ValueError(
                f"out.numerics={self.out.numerics!r} rounds stochastically, and there "
                "is no noise for a result; set stochastic_rounding=False here"
            )
        if self.out.is_quantized and self.out.calibration.is_learned:
            raise ValueError(
                f"out.calibration={self.out.calibration!r} is learned, and only those "
                "of fwd.lhs and fwd.rhs can be; use calibration.AbsMax(), for instance"
            )

    def _check_reuse(self, name: str, forward_side: str) -> None:
        """Checks `use_fwd_quant` in contraction `name`."""
        contraction: DotGeneralRaw = getattr(self, name)
        if not contraction.rhs.use_fwd_quant:
            return
        forward: Tensor = getattr(self.fwd, forward_side)
        if not forward.is_quantized:
            raise ValueError(
                f"{name}.rhs.use_fwd_quant=True takes the forward's integers, but "
                f"fwd.{forward_side} is not quantized; set fwd.{forward_side}.numerics,"
                f" or {name}.rhs.use_fwd_quant=False"
            )
        if contraction.dg_accumulator_dtype == np.dtype("int32"):
            taken = contraction.rhs if forward.use_fake_quant else forward
            field_checks.check_int32_accumulator(f"{name}.rhs", taken, f"{name}.")

    @property
    def needs_noise(self) -> bool:
        """True if any operand of the three contractions is rounded stochastically."""
        return any(
            tensor.needs_noise
            for contraction in (self.fwd, self.dlhs, self.drhs)
            for tensor in (contraction.lhs, contraction.rhs)
        )

    def for_serving(self) -> "DotGeneral":
        """A copy of the config with forward operands rounded to nearest.

        Converted models use this config: frozen weights and activations are rounded to
        nearest even if training rounded stochastically, so serving needs no noise and
        is deterministic.

        >>> from aqtlite import config, numerics
        >>> noisy = numerics.IntSymmetric(
        ...     bits=4, preserve_max_val=True, stochastic_rounding=True
        ... )
        >>> cfg = config.update(config.qat(4), {"fwd.rhs.numerics": noisy})
        >>> cfg.for_serving().fwd.rhs.numerics.stochastic_rounding
        False
        """
        lhs, rhs = self.fwd.lhs.to_nearest(), self.fwd.rhs.to_nearest()
        if (lhs, rhs) == (self.fwd.lhs, self.fwd.rhs):
            return self
        fwd = dataclasses.replace(self.fwd, lhs=lhs, rhs=rhs)
        return dataclasses.replace(self, fwd=fwd)

    @property
    def is_quantized(self) -> bool:
        """True if the result, or an operand of a contraction, is quantized."""
        return self.out.is_quantized or any(
            tensor.is_quantized
            for contraction in (self.fwd, self.dlhs, self.drhs)
            for tensor in (contraction.lhs, contraction.rhs)
        )

    @property
    def has_states(self) -> bool:
        """True if a calibration of an operand, or its smoothing, keeps a state."""
        return (
            self.has_parameters
            or self.has_gradient_states
            or self.has_smoothing_state
            or self.fwd.lhs.gathers_statistics
            or self.fwd.rhs.gathers_statistics
            or self.fwd.rhs.rounding is not None
        )

    @property
    def has_parameters(self) -> bool:
        """True if a calibration is learned."""
        return self.fwd.lhs.is_learned or self.fwd.rhs.is_learned

    @property
    def has_gradient_states(self) -> bool:
        """True if a calibration gathers statistics of the output gradient."""
        return self.dlhs.lhs.gathers_statistics or self.drhs.lhs.gathers_statistics

    @property
    def has_smoothing_state(self) -> bool:
        """True if the scales of a smoothing come from statistics."""
        return self.fwd.smoothing is not None and self.fwd.smoothing.has_state

    def with_float_out(self) -> "DotGeneral":
        """A copy of the config without quantization of the result."""
        return (
            dataclasses.replace(self, out=Tensor()) if self.out.is_quantized else self
        )
