"""Convolutions of a dilated lhs, without the zeros between its elements.

With a dilation ``a`` of lhs and stride 1, a position ``j`` of the result meets an
element of lhs at the positions ``k`` of the kernel with ``j + d k = low (mod a)``.
Positions with equal ``j (mod a)``, a phase, meet the same part of the kernel. Each
phase is a convolution of the undilated lhs with that part; the results of the phases
are interleaved.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from aqtlite.lowering.forms.convolution import Convolution

Run = Callable[[jax.Array, jax.Array, Convolution], jax.Array]


def conv(
    lhs: jax.Array, rhs: jax.Array, convolution: Convolution, run: Run
) -> jax.Array:
    """Convolves phase by phase along each dilated axis.

    Args:
        lhs: array of any dtype.
        rhs: array of any dtype.
        convolution: the convolution.
        run: function that evaluates a convolution of an undilated lhs, to int32.
    """
    steps = zip(convolution.lhs_dilation, convolution.strides, strict=True)
    dilated = [axis for axis, (a, s) in enumerate(steps) if a > 1 and s == 1]
    if not dilated:
        return run(lhs, rhs, convolution)
    axis = dilated[0]
    shape = convolution.output_shape(lhs.shape, rhs.shape)
    lhs_axis, rhs_axis, out_axis = (
        spec[2 + axis]
        for spec in (convolution.lhs_spec, convolution.rhs_spec, convolution.out_spec)
    )
    a, d = convolution.lhs_dilation[axis], convolution.rhs_dilation[axis]
    low, _ = convolution.padding[axis]
    count = -(-shape[out_axis] // a)
    sizes = *shape[:out_axis], count, *shape[out_axis + 1 :]
    phases = []
    for phase in range(a):
        met = [k for k in range(rhs.shape[rhs_axis]) if (phase + d * k - low) % a == 0]
        if not met:
            phases.append(jnp.zeros(sizes, jnp.int32))
            continue
        step = met[1] - met[0] if len(met) > 1 else 1
        dilation = d * step // a if len(met) > 1 else 1
        part = lax.slice_in_dim(rhs, met[0], met[-1] + 1, step, rhs_axis)
        first = (low - phase - d * met[0]) // a
        last = count - lhs.shape[lhs_axis] - first + (len(met) - 1) * dilation
        of_phase = dataclasses.replace(
            convolution,
            padding=_with(convolution.padding, axis, (first, last)),
            lhs_dilation=_with(convolution.lhs_dilation, axis, 1),
            rhs_dilation=_with(convolution.rhs_dilation, axis, dilation),
        )
        phases.append(conv(lhs, part, of_phase, run))
    out = jnp.stack(phases, out_axis + 1)
    out = out.reshape(*sizes[:out_axis], count * a, *sizes[out_axis + 1 :])
    return lax.slice_in_dim(out, 0, shape[out_axis], axis=out_axis)


def _with(values: tuple[Any, ...], axis: int, value: Any) -> tuple[Any, ...]:
    return (*values[:axis], value, *values[axis + 1 :])
