"""Learned clipping, relative to the range of the array."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.calibration import base, learned
from aqtlite.calibration.abs_max import AbsMax
from aqtlite.numerics import Numerics, fields
from aqtlite.shapes import dimension_numbers as dn
from aqtlite.shapes.dimension_numbers import Axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedClipping(base.Calibration):
    """A learned fraction of another calibration's bound: ``bound = factor * of(x)``.

    With `AbsMax`, this is the learnable weight clipping of OmniQuant (Shao et al. 2023,
    arXiv:2308.13137), except that the factor itself is trained, not its logit. Unlike a
    learned step (`LSQ`), it follows arrays that grow in training.

    For a scale ``s``, an element ``x`` becomes ``s * round(clip(x, -bound, bound) /
    s)``. The derivative by the factor is ``s / factor`` times ``round(x / s) - x / s``
    where ``x`` is not clipped, and times the last level of the grid where it is. The
    derivative by ``x`` is 1 where ``x`` is not clipped, otherwise 0. As in `LSQ`, the
    factor is the magnitude of the parameter, at least 2^-100.

    >>> import jax.numpy as jnp
    >>> how, x = LearnedClipping(initial=0.75), jnp.array([4.0, -1.0])
    >>> parameters = how.init_parameters(x, (0,), None)
    >>> how.range(x, (0,), None, parameters).high.tolist()
    [3.0]

    Raises:
        TypeError: if `of` is not a calibration, or `initial` not a number.
        ValueError: if `of` gathers statistics or is learned itself, or `initial` is
            not positive and finite in float32; in a contraction, if the grid has a zero
            point, or the parameters are those of another granularity.
    """

    of: base.Calibration = AbsMax()
    """Calibration that finds the bound to multiply, for symmetric grids."""

    initial: float = 1.0
    """Factor before training."""

    def __post_init__(self) -> None:
        base.check_looks_at_one_array(self.of, "LearnedClipping.of")
        fields.check(self, initial=fields.positive)

    @property
    def is_learned(self) -> bool:
        return True

    @property
    def is_blind(self) -> bool:
        return self.of.is_blind

    @property
    def cost_in_training(self) -> str | None:
        return self.of.cost_in_training

    def init_parameters(
        self, x: jax.Array, axes: Axes, grid: Numerics
    ) -> base.Parameters:
        del grid
        shape = dn.shared_shape(x.shape, axes)
        return {"factor": jnp.full(shape, np.float32(self.initial))}

    def range(
        self, x: jax.Array, axes: Axes, grid: Numerics, state: base.Parameters
    ) -> base.Range:
        found = self.of.range(x, axes, grid, ())
        if found.low is not None:
            raise ValueError(
                f"LearnedClipping is for symmetric grids, and of={self.of!r} gives a "
                "smallest value as well; learn the range with calibration.LSQPlus()"
            )
        factor = learned.magnitude(state["factor"])
        if factor.shape != found.high.shape:
            raise ValueError(
                f"LearnedClipping was given factors of shape {factor.shape}, and "
                f"of={self.of!r} finds bounds of shape {found.high.shape}: they were "
                "made with another calib_shared_axes or other blocks. Make the "
                "parameters again with this config"
            )
        return base.Range(found.high * factor)

    def gradient_mask(
        self, parameters: base.Parameters, values: base.Quantized, grid: Numerics
    ) -> jax.Array:
        del parameters
        return jnp.abs(values.x) <= values.scale * np.float32(grid.bound)

    def parameters_gradient(
        self,
        parameters: base.Parameters,
        values: base.Quantized,
        gradient: jax.Array,
        axes: Axes,
        grid: Numerics,
    ) -> base.Parameters:
        factor = parameters["factor"]
        is_inside = self.gradient_mask(parameters, values, grid)
        change = values.rounded - jnp.where(is_inside, values.x, np.float32(0))
        by_factor = change / learned.magnitude(factor)
        total = learned.total(gradient * by_factor, axes)
        return {"factor": total * learned.sign_of(factor)}
