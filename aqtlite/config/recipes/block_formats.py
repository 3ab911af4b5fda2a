"""Presets for block formats: grids with one scale per small block of elements."""

import dataclasses

import jax.numpy as jnp

from aqtlite import numerics
from aqtlite.config.blocks import Blocks
from aqtlite.config.dot_general import DotGeneral, DotGeneralRaw
from aqtlite.config.rotation import Hadamard
from aqtlite.config.tensor import Tensor
from aqtlite.numerics import fields


def mxfp8(*, gradient: str = "float8_e4m3fn", may_clip: bool = False) -> DotGeneral:
    """MXFP8 of the OCP Microscaling specification (arXiv:2310.10537).

    Blocks of 32 elements along the contracting axis (the largest smaller divisor of an
    axis that 32 does not divide), with power-of-two scales. The forward and both
    backward contractions quantize their operands, each along its own contracting axis.

    Each scale is the smallest power of two that clips no element. The specification's
    scales clip the largest element of a block by up to an eighth, and training with
    them may diverge (Mishra et al. 2025, arXiv:2506.08027).

    >>> mxfp8().fwd.rhs
    Tensor(
        numerics=Float(exponent_bits=4, mantissa_bits=3),
        blocks=Blocks(size=32, fit=True),
        po2_scale=True,
        scale_dtype='float8_e8m0fnu',
    )

    Args:
        gradient: dtype of output gradients, such as float8_e5m2.
        may_clip: use the specification's scales.

    Raises:
        ValueError: if `gradient` is not the dtype of a `numerics.Float`.
        TypeError: if `may_clip` is not a bool.
    """
    operand = numerics.Float.from_dtype("float8_e4m3fn")
    of_output = numerics.Float.from_dtype(gradient)
    return _in_all(_mx(operand, may_clip), _mx(of_output, may_clip))


def mxfp6(*, gradient: str = "float6_e3m2fn", may_clip: bool = False) -> DotGeneral:
    """MXFP6: like `mxfp8`, with E2M3 for operands and E3M2 for gradients.

    >>> mxfp6().fwd.rhs.numerics.name, mxfp6().dlhs.lhs.numerics.name
    ('fp6_e2m3', 'fp6_e3m2')

    Args:
        gradient: dtype of output gradients.
        may_clip: use the specification's scales.

    Raises:
        ValueError: if `gradient` is not the dtype of a `numerics.Float`.
        TypeError: if `may_clip` is not a bool.
    """
    operand = numerics.Float.from_dtype("float6_e2m3fn")
    of_output = numerics.Float.from_dtype(gradient)
    return _in_all(_mx(operand, may_clip), _mx(of_output, may_clip))


def mxfp4(*, may_clip: bool = False) -> DotGeneral:
    """MXFP4: like `mxfp8`, with E2M1 and stochastic rounding of gradients.

    >>> mxfp4().dlhs.lhs.numerics.name, mxfp4().dlhs.lhs.needs_noise
    ('fp4_e2m1', True)

    Args:
        may_clip: use the specification's scales, except for gradients: stochastic
            rounding must not clip.

    Raises:
        TypeError: if `may_clip` is not a bool.
    """
    operand = numerics.Float.from_dtype("float4_e2m1fn")
    return _in_all(_mx(operand, may_clip), _mx(_stochastic(operand), may_clip=False))


def mxint8(*, may_clip: bool = False) -> DotGeneral:
    """MXINT8: like `mxfp8`, with int8 and stochastic rounding of gradients.

    The value -2, which the specification makes optional, is not used.

    >>> mxint8().fwd.lhs.numerics.name
    'int8'

    Args:
        may_clip: use the specification's scales, except for gradients.

    Raises:
        TypeError: if `may_clip` is not a bool.
    """
    operand = numerics.IntSymmetric(bits=8)
    gradient = numerics.IntSymmetric(
        bits=8, preserve_max_val=True, stochastic_rounding=True
    )
    return _in_all(_mx(operand, may_clip), _mx(gradient, may_clip=False))


def nvfp4(*, per_tensor: bool = False, hadamard: bool = False) -> DotGeneral:
    """NVFP4, the four-bit format of NVIDIA's Blackwell GPUs (arXiv:2509.25149).

    E2M1 in blocks of 16 elements along the contracting axis, with E4M3 scales times a
    float32 scale: one for each row of activations and gradients, so that no position
    or example of a batch sees another, and one per tensor for weights (the forward's
    rhs). As in the paper's training recipe, weights have blocks of 16 x 16 and output
    gradients are rounded stochastically. The recipe's Hadamard transforms of the weight
    gradient are an option.

    >>> nvfp4().fwd.rhs
    Tensor(
        numerics=Float(exponent_bits=2, mantissa_bits=1),
        blocks=Blocks(size=16, remaining_size=16, fit=True),
        scale_dtype='float8_e4m3fn',
        scale_shared_axes='per_tensor',
    )
    >>> nvfp4(hadamard=True).drhs.rotation
    Hadamard(size=16, fit=True)

    Args:
        per_tensor: use one float32 scale per tensor for activations and gradients, too,
            as the paper does. Positions and examples of a batch then change each
            other's results.
        hadamard: rotate both operands of the weight gradient by random Hadamard
            matrices of order 16, along the rows of the batch, with the same signs in
            all steps. Small models gained nothing from it here.

    Raises:
        TypeError: if an argument is not a bool.
    """
    fields.flag(per_tensor, "nvfp4: per_tensor")
    fields.flag(hadamard, "nvfp4: hadamard")
    rotation = Hadamard(size=16, fit=True) if hadamard else None
    grid = numerics.Float.from_dtype("float4_e2m1fn")

    squares = Blocks(size=16, remaining_size=16, fit=True)
    weight = Tensor(
        numerics=grid,
        blocks=squares,
        scale_dtype=_E4M3,
        scale_shared_axes="per_tensor",
    )
    operand = Tensor(
        numerics=grid,
        blocks=Blocks(size=16, fit=True),
        scale_dtype=_E4M3,
        scale_shared_axes="per_tensor" if per_tensor else None,
    )
    gradient = dataclasses.replace(operand, numerics=_stochastic(grid))
    return DotGeneral(
        fwd=DotGeneralRaw(lhs=operand, rhs=weight),
        dlhs=DotGeneralRaw(lhs=gradient, rhs=weight),
        drhs=DotGeneralRaw(lhs=gradient, rhs=operand, rotation=rotation),
    )


def block_fp8(size: int = 128) -> DotGeneral:
    """E4M3 in blocks, as in the training of DeepSeek-V3 (arXiv:2412.19437, sec. 3.3).

    Activations and gradients have one scale per `size` elements of the contracting
    axis, weights (the forward's rhs) one per ``size x size`` square.

    >>> block_fp8().fwd.rhs.blocks, block_fp8().fwd.lhs.blocks
    (Blocks(size=128, remaining_size=128, fit=True), Blocks(size=128, fit=True))

    Args:
        size: size of the blocks; on an axis that it does not divide, the largest
            smaller divisor.

    Raises:
        TypeError: if `size` is not an int.
        ValueError: if `size` is below 1.
    """
    fields.integer(1)(size, "block_fp8.size")
    grid = numerics.Float.from_dtype("float8_e4m3fn")
    operand = Tensor(numerics=grid, blocks=Blocks(size=size, fit=True))
    squares = Blocks(size=size, remaining_size=size, fit=True)
    weight = Tensor(numerics=grid, blocks=squares)
    return DotGeneral(
        fwd=DotGeneralRaw(lhs=operand, rhs=weight),
        dlhs=DotGeneralRaw(lhs=operand, rhs=weight),
        drhs=DotGeneralRaw(lhs=operand, rhs=operand),
    )


_E8M0, _E4M3 = jnp.dtype("float8_e8m0fnu"), jnp.dtype("float8_e4m3fn")


def _mx(grid: numerics.Numerics, may_clip: bool) -> Tensor:
    fields.flag(may_clip, "may_clip")
    blocks = Blocks(size=32, fit=True)
    return Tensor(
        numerics=grid, po2_scale=not may_clip, blocks=blocks, scale_dtype=_E8M0
    )


def _stochastic(grid: numerics.Float) -> numerics.Float:
    return dataclasses.replace(grid, stochastic_rounding=True)


def _in_all(operand: Tensor, gradient: Tensor) -> DotGeneral:
    backward = DotGeneralRaw(lhs=gradient, rhs=operand)
    return DotGeneral(
        fwd=DotGeneralRaw(lhs=operand, rhs=operand), dlhs=backward, drhs=backward
    )
