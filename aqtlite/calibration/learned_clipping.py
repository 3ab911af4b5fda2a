"""Learned clipping relative to what the array holds."""

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
    """A learned part of what another calibration finds: ``bound = factor * of(x)``.

    With `AbsMax` it is the learnable weight clipping of OmniQuant (Shao et al. 2023,
    arXiv:2308.13137), of which the factor is trained itself, not its logit. It follows
    arrays that grow in training, as a step that is learned (`LSQ`) does not.

    For a scale ``s``, an element ``x`` becomes ``s * round(clip(x, -bound, bound) /
    s)``. Its derivative by the factor is ``s / factor`` times ``round(x / s) - x / s``
    where it is not clipped, and times the last level of the grid where it is. By ``x``
    it is 1 where it is not clipped, otherwise 0. As in `LSQ`, what counts is the
    magnitude of the parameter; it is at least 2^-100.

    >>> import jax.numpy as jnp
    >>> how, x = LearnedClipping(initial=0.75), jnp.array([4.0, -1.0])
    >>> parameters = how.init_parameters(x, (0,), None)
    >>> how.range(x, (0,), None, parameters).high.tolist()
    [3.0]

    Raises:
        TypeError: if `of` is not a calibration, or `initial` not a number.
        ValueError: if `of` gathers statistics or is learned itself, or `initial` is
            not positive and finite in float32; in a contraction, if the grid has a zero
            point.
    """

    of: base.Calibration = AbsMax()
    """Finds what the factor is a part of, for symmetric grids."""

    initial: float = 1.0
    """The factor before training."""

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
        return base.Range(found.high * learned.magnitude(state["factor"]))

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
