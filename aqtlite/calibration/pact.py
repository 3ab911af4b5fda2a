"""Learned clipping bounds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.calibration import base, learned
from aqtlite.calibration.abs_max import AbsMax
from aqtlite.numerics import Numerics, fields
from aqtlite.shapes.dimension_numbers import Axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class PACT(base.Calibration):
    """A learned clipping bound (PACT; Choi et al. 2018, arXiv:1805.06085).

    With a bound ``a``, an element ``x`` is clipped to ``[0, a]`` on a grid with a zero
    point, or to ``[-a, a]`` on a symmetric one, and then rounded. The gradient passes
    straight through the rounding, so the derivative is

    - by the bound: 0 where ``x`` is not clipped, 1 at and above ``a``, and -1 at and
      below ``-a`` on a symmetric grid;
    - by ``x``: 1 where it is not clipped, otherwise 0.

    The gradient of the bound is summed over the elements that share it, and is zero if
    none is clipped; the paper applies L2 decay to the bound, so that it does not stay
    too wide. As in `LSQ`, the bound is the magnitude of the parameter.

    >>> import jax.numpy as jnp
    >>> PACT().init_parameters(jnp.array([3.0, -5.0]), (0,), None)["bound"].tolist()
    [5.0]

    Raises:
        TypeError: if `initial` is not a number.
        ValueError: if `initial` is not positive and finite in float32.
    """

    initial: float | None = None
    """Bound before training. None: the largest magnitude of the first batch or of the
    weights, or 1 if these are all zero. The paper starts at 10."""

    def __post_init__(self) -> None:
        fields.check(self, initial=fields.or_none(fields.positive))

    @property
    def is_learned(self) -> bool:
        return True

    def init_parameters(
        self, x: jax.Array, axes: Axes, grid: Numerics
    ) -> base.Parameters:
        del grid
        bound = learned.or_one(AbsMax().bound(x, axes))
        if self.initial is not None:
            bound = jnp.full_like(bound, np.float32(self.initial))
        return {"bound": bound}

    def range(
        self, x: jax.Array, axes: Axes, grid: Numerics, state: base.Parameters
    ) -> base.Range:
        del x, axes
        bound = learned.magnitude(state["bound"])
        if grid.zero_point_range is None:
            return base.Range(bound)
        return base.Range(bound, jnp.zeros_like(bound))

    def gradient_mask(
        self, parameters: base.Parameters, values: base.Quantized, grid: Numerics
    ) -> jax.Array:
        bound = learned.magnitude(parameters["bound"])
        if grid.zero_point_range is None:
            return jnp.abs(values.x) < bound
        return (values.x >= 0) & (values.x < bound)

    def parameters_gradient(
        self,
        parameters: base.Parameters,
        values: base.Quantized,
        gradient: jax.Array,
        axes: Axes,
        grid: Numerics,
    ) -> base.Parameters:
        bound = learned.magnitude(parameters["bound"])
        by_bound = jnp.where(values.x >= bound, np.float32(1), np.float32(0))
        if grid.zero_point_range is None:
            by_bound = jnp.where(values.x <= -bound, np.float32(-1), by_bound)
        total = learned.total(gradient * by_bound, axes)
        return {"bound": total * learned.sign_of(parameters["bound"])}
