"""The straight-through estimator of one operand (Bengio et al. 2013, arXiv:1308.3432).

It decides at which elements the gradient of the rounded operand passes on to the
operand, and how much goes to the parameters of a learned calibration.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import calibration, config
from aqtlite.contraction import poison
from aqtlite.contraction.execution import OperandExecution
from aqtlite.lowering import exact
from aqtlite.numerics import Numerics
from aqtlite.operations import OperandAxes
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization import quantizer
from aqtlite.quantization.seeds import Seeds
from aqtlite.shapes import block_shapes
from aqtlite.shapes.sharding import with_sharding_of

_NO_SEEDS = Seeds()


def quantized(
    x: jax.Array,
    tensor: config.Tensor,
    axes: OperandAxes,
    path: str,
    seeds: Seeds = _NO_SEEDS,
    state: Any = (),
) -> QTensor:
    """Quantizes an array that a contraction is to take as a `QTensor`.

    The result carries the array (``unrounded``), to which the contraction passes the
    gradient where the grid lets it pass. The arguments are those of
    `quantizer.quantize_array`.
    """
    fixed = jax.lax.stop_gradient(x)
    q = quantizer.quantize_array(fixed, tensor, axes, path, seeds, state)
    if tensor.calibration.is_blind:
        q = poison.with_poisoned_scale(fixed, q, tensor, axes, path, state)
    mask = gradient_mask(fixed, q)
    unrounded = x if mask is None else jnp.where(mask, x, fixed)
    return dataclasses.replace(q, unrounded=unrounded)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["mask", "learned"],
    meta_fields=["tensor"],
)
@dataclasses.dataclass(frozen=True)
class Estimator:
    """The residuals of one operand."""

    tensor: config.Tensor
    mask: jax.Array | None
    """Elements at which the gradient passes. None: all, or the mask of `learned`."""

    learned: "Learned | None"
    """None if the calibration is not learned."""

    def gradients(self, gradient: jax.Array) -> tuple[jax.Array, Any]:
        """The gradients of the operand and of the learned parameters (None without).

        Args:
            gradient: gradient of the rounded operand.
        """
        mask, parameters = self.mask, None
        if self.learned is not None:
            mask, parameters = self.learned.gradients(self.tensor, gradient)
        if mask is not None:
            gradient = jnp.where(mask, gradient, 0)
        return gradient, parameters


def estimator(
    one: OperandExecution, x: jax.Array, q: QTensor | None, state: Any
) -> Estimator:
    """Makes the estimator of an operand.

    Args:
        one: execution of the operand.
        x: the float operand.
        q: the operand quantized; None if it stayed in floating point.
        state: state of the calibration.
    """
    if q is None or one.is_given:  # A given one was clipped where it was made.
        return Estimator(one.tensor, None, None)
    if one.tensor.is_learned:
        return Estimator(one.tensor, None, Learned(state, x, q))
    return Estimator(one.tensor, gradient_mask(x, q), None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Learned:
    """The residuals of an operand whose calibration is learned."""

    parameters: calibration.Parameters
    x: Any
    q: QTensor

    def gradients(
        self, tensor: config.Tensor, gradient: jax.Array
    ) -> tuple[jax.Array | None, calibration.Parameters]:
        """The elements at which the gradient passes, and the parameters' gradients.

        Args:
            tensor: config of the operand.
            gradient: gradient of the rounded operand.

        Returns:
            A mask, None for all elements; and arrays like the parameters.

        Raises:
            TypeError: if a user's calibration returns anything but a mask.
            ValueError: if it returns arrays unlike the parameters.
        """
        values, of = self._values(), tensor.calibration
        mask = of.gradient_mask(self.parameters, values, tensor.grid)
        mask = _checked(mask, of, values.x.shape)
        if mask is None:
            mask = gradient_mask(self.x, self.q)
        else:
            mask = block_shapes.merge(mask, like=self.x)
        return mask, self._of_parameters(tensor, values, gradient)

    def _values(self) -> calibration.Quantized:
        """The operand before and after quantization, split into blocks."""
        unit = 1.0 if self.q.numerics is None else self.q.numerics.unit
        wide = dataclasses.replace(self.q, dtype=np.dtype("float32"))
        zero_point = self.q.zero_point
        if zero_point is not None:
            zero_point = block_shapes.split_keepdims(zero_point, self.x.shape)
        return calibration.Quantized(
            self._in_blocks(self.x),
            self._in_blocks(wide.dequant()),
            block_shapes.split_keepdims(self.q.scale, self.x.shape) / np.float32(unit),
            zero_point,
        )

    def _in_blocks(self, x: jax.Array) -> jax.Array:
        return block_shapes.split(exact.float32(x), self.q.scale.shape)

    def _of_parameters(
        self, tensor: config.Tensor, values: calibration.Quantized, gradient: jax.Array
    ) -> calibration.Parameters:
        axes = tuple(i for i, size in enumerate(values.scale.shape) if size == 1)
        found = tensor.calibration.parameters_gradient(
            self.parameters, values, self._in_blocks(gradient), axes, tensor.grid
        )
        # Parameters that were cast need gradients in their own dtype.
        found = {
            name: one.astype(self.parameters[name].dtype)
            if name in self.parameters and one.dtype == jnp.float32
            else one
            for name, one in found.items()
        }
        got, wanted = (
            {name: (one.dtype.name, one.shape) for name, one in arrays.items()}
            for arrays in (found, self.parameters)
        )
        if got != wanted:
            raise ValueError(
                f"{type(tensor.calibration).__name__}.parameters_gradient must return "
                f"arrays like the parameters, {wanted}, got {got}"
            )
        # They come with the sharding of the operand.
        return {
            name: with_sharding_of(self.parameters[name], one)
            for name, one in found.items()
        }


def gradient_mask(x: jax.Array, q: QTensor) -> jax.Array | None:
    """The elements at which the grid lets the gradient pass; None for all.

    Args:
        x: the array that was quantized.
        q: `x` quantized.

    Raises:
        TypeError: if a user's grid returns anything but a mask.
    """
    grid = q.numerics
    if grid is None or not _has_mask(grid, x.ndim, q.zero_point is not None):
        return None
    if block_shapes.has_blocks(x.shape, q.scale.shape):
        blocks = block_shapes.split(x, q.scale.shape)
        scale = block_shapes.split_keepdims(q.scale, x.shape)
        scaled = block_shapes.merge(quantizer.scaled(blocks, scale, grid), like=x)
    else:
        scaled = quantizer.scaled(x, q.scale, grid)
    if q.zero_point is None:
        mask = grid.gradient_mask(scaled)
    else:
        zero_point = block_shapes.repeat(q.zero_point, x.shape, range(x.ndim))
        mask = grid.gradient_mask_around(scaled, zero_point)
    return _checked(mask, grid, x.shape)


@functools.lru_cache(maxsize=4096)
def _has_mask(grid: Numerics, ndim: int, has_zero_point: bool) -> bool:
    """Whether a grid stops the gradient of any elements.

    Most grids do not; then no values are scaled only to be handed to their masks.
    """
    shape = (1,) * ndim
    scaled = jax.ShapeDtypeStruct(shape, jnp.float32)
    if not has_zero_point:
        return jax.eval_shape(grid.gradient_mask, scaled) is not None
    zero_point = jax.ShapeDtypeStruct(shape, jnp.int32)
    return jax.eval_shape(grid.gradient_mask_around, scaled, zero_point) is not None


def _checked(mask: Any, source: Any, shape: tuple[int, ...]) -> jax.Array | None:
    if mask is not None and (mask.dtype != jnp.bool_ or mask.shape != shape):
        raise TypeError(
            f"{type(source).__name__}.gradient_mask must return a bool array of shape "
            f"{shape}, got {mask.dtype} of shape {mask.shape}"
        )
    return mask
