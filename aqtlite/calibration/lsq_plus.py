"""Learned step sizes with a learned shift."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.calibration import base, learned, min_max
from aqtlite.numerics import Numerics, fields
from aqtlite.shapes.dimension_numbers import Axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class LSQPlus(base.Calibration):
    """A learned step and shift (LSQ+; Bhalgat et al. 2020, arXiv:2004.09576).

    For asymmetric activations, such as those of Swish, on a grid with a zero point and
    stored values from ``n`` to ``p``. With a step ``s`` and a shift ``b``, an element
    ``x`` becomes ``s * q + b`` with ``q = clip(round((x - b) / s), n, p)``. The
    derivative is

    - by the step: ``q - (x - b) / s`` where ``n < (x - b) / s < p``, and ``n`` or ``p``
      outside;
    - by the shift: 0 inside, and 1 outside;
    - by ``x``: 1 inside, and 0 outside.

    So that integers can be contracted, the shift is rounded to ``-z`` steps, where the
    zero point ``z`` is an integer from ``n`` to ``p``; zero is then a stored value. The
    gradient passes straight through this rounding.

    Step and shift are initialized from the range of the first batch, widened to contain
    zero: ``s = (max - min) / (p - n)`` and ``b = min - n * s``. Both gradients are
    summed over the elements that share the parameters and multiplied with the factor of
    `LSQ`, with p - n in place of ``Q_P``. As in `LSQ`, the step is the magnitude of the
    parameter.

    >>> import jax.numpy as jnp
    >>> from aqtlite import numerics
    >>> grid = numerics.IntAffine(bits=2)
    >>> start = LSQPlus().init_parameters(jnp.array([2.0, -1.0]), (0,), grid)
    >>> start["step"].tolist(), start["shift"].tolist()
    ([1.0], [-1.0])

    Raises:
        TypeError: if `gradient_scale` is not a number.
        ValueError: if `gradient_scale` is not positive and finite in float32, or the
            grid has no zero point.
    """

    gradient_scale: float | None = None
    """Factor of both gradients. None: ``1 / sqrt(N * (p - n))`` for N elements."""

    def __post_init__(self) -> None:
        fields.check(self, gradient_scale=fields.or_none(fields.positive))

    @property
    def is_learned(self) -> bool:
        return True

    def init_parameters(
        self, x: jax.Array, axes: Axes, grid: Numerics
    ) -> base.Parameters:
        smallest, largest = _stored(grid)
        high, low = min_max.ends(x, axes)
        width = np.float32(1 / (largest - smallest))
        step = learned.or_one(high * width - low * width)
        return {"step": step, "shift": low - np.float32(smallest) * step}

    def range(
        self, x: jax.Array, axes: Axes, grid: Numerics, state: base.Parameters
    ) -> base.Range:
        del x, axes
        smallest, largest = _stored(grid)
        step = learned.magnitude(state["step"])
        shift = jnp.clip(state["shift"] / step, -largest, -smallest)
        # Not a sum of products, which a compiler could contract to an FMA.
        return base.Range(step * (shift + largest), step * (shift + smallest))

    def gradient_mask(
        self, parameters: base.Parameters, values: base.Quantized, grid: Numerics
    ) -> jax.Array:
        del parameters
        return learned.is_inside(_unshifted(values), *_stored(grid))[0]

    def parameters_gradient(
        self,
        parameters: base.Parameters,
        values: base.Quantized,
        gradient: jax.Array,
        axes: Axes,
        grid: Numerics,
    ) -> base.Parameters:
        smallest, largest = _stored(grid)
        values = _unshifted(values)
        by_step = learned.step_gradient(values, smallest, largest)
        inside, _ = learned.is_inside(values, smallest, largest)
        scale = learned.gradient_scale(
            self.gradient_scale, values.x, axes, largest - smallest
        )
        step = learned.total(gradient * by_step, axes) * scale
        return {
            "step": step * learned.sign_of(parameters["step"]),
            "shift": learned.total(jnp.where(inside, 0, gradient), axes) * scale,
        }


def _stored(grid: Numerics) -> tuple[float, float]:
    """The smallest and largest stored value."""
    if grid.zero_point_range is None:
        raise ValueError(
            f"calibration.LSQPlus learns a shift, but the grid {grid!r} has no zero "
            "point; use numerics.IntAffine, or calibration.LSQ"
        )
    smallest, largest = grid.zero_point_range
    return float(smallest), float(largest)


def _unshifted(values: base.Quantized) -> base.Quantized:
    """The values minus the shift, so that the levels are the stored values."""
    if values.zero_point is None:
        return values
    shift = values.zero_point.astype(jnp.float32) * values.scale
    return values._replace(x=values.x + shift, rounded=values.rounded + shift)
