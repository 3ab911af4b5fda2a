"""Learned step sizes."""

import dataclasses

import jax
import numpy as np

from aqtlite.calibration import base, learned, power_mean
from aqtlite.numerics import Numerics, fields
from aqtlite.shapes.dimension_numbers import Axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class LSQ(base.Calibration):
    """A step that is trained with the weights (Esser et al. 2020, arXiv:1902.08153).

    For a step ``s`` and a grid from ``-Q_N`` to ``Q_P``, an element ``x`` becomes
    ``s * clip(round(x / s), -Q_N, Q_P)``, whose derivative by the step is
    ``round(x / s) - x / s`` where ``-Q_N < x / s < Q_P``, and ``-Q_N`` or ``Q_P``
    beyond. The gradient is the sum over the elements that share the step, times
    ``1 / sqrt(n * Q_P)`` for n of them. (The paper counts the features of one example
    where activations share a step, without the batch: `gradient_scale` gives that.)
    The gradient of ``x`` passes inside, and is zero beyond, whatever the grid says.

    The step starts at ``2 * mean(|x|) / sqrt(Q_P)`` of the first batch, or of the
    weights, and at 1 if all of them are zeros. What counts is its magnitude, and at
    least 2^-100: a step that an optimizer moves across zero works like its negative.

    ``Q_N`` and ``Q_P`` are the ends of the grid: 2^(b-1) - 1 for `IntSymmetric`, 0 and
    2^b - 1 for an unsigned `IntAffine`, whose zero point is then 0.

    >>> import jax.numpy as jnp
    >>> from aqtlite import numerics
    >>> grid = numerics.IntSymmetric(bits=2)
    >>> LSQ().init_parameters(jnp.array([3.0, -1.0]), (0,), grid)["step"].tolist()
    [4.0]

    Raises:
        TypeError: if `gradient_scale` is not a number.
        ValueError: if it is not positive and finite in float32.
    """

    gradient_scale: float | None = None
    """The factor of the gradient. None: ``1 / sqrt(n * Q_P)``."""

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
