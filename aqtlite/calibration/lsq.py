"""Learned step sizes."""

import dataclasses

import jax
import numpy as np

from aqtlite.calibration import base, learned, power_mean
from aqtlite.numerics import Numerics, fields
from aqtlite.shapes.dimension_numbers import Axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class LSQ(base.Calibration):
    """A step trained with the weights (LSQ; Esser et al. 2020, arXiv:1902.08153).

    For a step ``s`` and a grid from ``-Q_N`` to ``Q_P``, an element ``x`` becomes
    ``s * clip(round(x / s), -Q_N, Q_P)``. The derivative by the step is
    ``round(x / s) - x / s`` where ``-Q_N < x / s < Q_P``, and ``-Q_N`` or ``Q_P``
    outside. The gradient of the step is the sum over the elements that share it, times
    ``1 / sqrt(n * Q_P)`` for n such elements. (For activations, the paper's n is the
    number of features of one example, without the batch: set `gradient_scale` for
    that.) The gradient of ``x`` passes inside the range and is zero outside, even if
    the grid does not set `clip_gradient`.

    The step is initialized to ``2 * mean(|x|) / sqrt(Q_P)`` of the first batch or of
    the weights, and to 1 if these are all zero. The step is the magnitude of the
    parameter, at least 2^-100: a parameter that an optimizer moves across zero acts
    like its positive counterpart.

    ``Q_N`` and ``Q_P`` are the ends of the grid: both 2^(b-1) - 1 for `IntSymmetric`;
    0 and 2^b - 1 for an unsigned `IntAffine`, with a zero point of 0.

    >>> import jax.numpy as jnp
    >>> from aqtlite import numerics
    >>> grid = numerics.IntSymmetric(bits=2)
    >>> LSQ().init_parameters(jnp.array([3.0, -1.0]), (0,), grid)["step"].tolist()
    [4.0]

    Raises:
        TypeError: if `gradient_scale` is not a number.
        ValueError: if `gradient_scale` is not positive and finite in float32.
    """

    gradient_scale: float | None = None
    """Factor of the step's gradient. None: ``1 / sqrt(n * Q_P)``."""

    def __post_init__(self) -> None:
        fields.check(self, gradient_scale=fields.or_none(fields.positive))

    @property
    def is_learned(self) -> bool:
        return True

    def init_parameters(
        self, x: jax.Array, axes: Axes, grid: Numerics
    ) -> base.Parameters:
        _, largest = learned.levels(grid)
        mean = power_mean.power_mean(x, axes, 1.0)
        return {"step": learned.or_one(mean * np.float32(2 / np.sqrt(largest)))}

    def range(
        self, x: jax.Array, axes: Axes, grid: Numerics, state: base.Parameters
    ) -> base.Range:
        del x, axes
        return learned.range_of_step(learned.magnitude(state["step"]), grid)

    def gradient_mask(
        self, parameters: base.Parameters, values: base.Quantized, grid: Numerics
    ) -> jax.Array:
        del parameters
        return learned.is_inside(values, *learned.levels(grid))[0]

    def parameters_gradient(
        self,
        parameters: base.Parameters,
        values: base.Quantized,
        gradient: jax.Array,
        axes: Axes,
        grid: Numerics,
    ) -> base.Parameters:
        smallest, largest = learned.levels(grid)
        by_step = learned.step_gradient(values, smallest, largest)
        scale = learned.gradient_scale(self.gradient_scale, values.x, axes, largest)
        total = learned.total(gradient * by_step, axes) * scale
        return {"step": total * learned.sign_of(parameters["step"])}
