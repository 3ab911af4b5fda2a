"""`lax.conv_general_dilated` in the forms of all platforms."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from aqtlite.lowering.contraction import Contraction
from aqtlite.lowering.forms import patches, plain, polyphase
from aqtlite.lowering.forms.convolution import Convolution
from aqtlite.shapes.dimension_numbers import Side


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[],
    meta_fields=["convolution", "out_sharding"],
)
@dataclasses.dataclass(frozen=True)
class Conv(Contraction):
    """A `lax.conv_general_dilated`."""

    convolution: Convolution
    out_sharding: NamedSharding | None = None

    def anywhere(self, lhs, rhs, precision):
        lhs, rhs = plain.without_int4(lhs, rhs)
        accumulator, sharding = plain.accumulator(lhs), self.out_sharding
        return self.convolution(lhs, rhs, accumulator, sharding, precision)

    def on_target(self, target, lhs, rhs, precision):
        # TPUs convolve int8. XLA:GPU has int8 convolutions only to float32 or int8
        # (jax-ml/jax#7637), and XLA:CPU runs a plain loop for some.
        is_integer = not jnp.issubdtype(lhs.dtype, jnp.floating)
        is_special = is_integer and (target.platform == "cpu" or target.is_gpu)
        if not is_special or self.out_sharding is not None:
            return self.anywhere(lhs, rhs, precision)
        run = functools.partial(patches.conv, target=target)
        lhs, rhs = plain.without_int4(lhs, rhs)
        return polyphase.conv(lhs, rhs, self.convolution, run)

    def sums(self, lhs, rhs, precision=None):
        shape = self.convolution.output_shape(lhs.shape, rhs.shape)
        if 0 in (*lhs.shape, *rhs.shape, *shape):
            return jnp.zeros(shape, plain.accumulator(lhs))
        return super().sums(lhs, rhs, precision)

    def products(self, lhs, rhs):
        return 0 if 0 in (*lhs, *rhs) else self.convolution.products(rhs)

    def pieces(self, lhs, rhs, limit):
        """Cuts the kernel along its input features, and then along its window."""
        _, *summed = self.convolution.rhs_spec
        sizes = [rhs[axis] for axis in summed]
        # The axes after the one that is cut stay whole as long as they fit.
        rests = [math.prod(sizes[index + 1 :]) for index in range(len(sizes))]
        steps = [
            min(size, max(1, limit // rest))
            for size, rest in zip(sizes, rests, strict=True)
        ]
        starts = (range(0, size, step) for size, step in zip(sizes, steps, strict=True))
        for start in itertools.product(*starts):
            stop = [
                min(a + step, size)
                for a, step, size in zip(start, steps, sizes, strict=True)
            ]
            yield self._piece(rhs, start, stop)

    def _piece(self, rhs, start, stop):
        """The convolution with a part of the kernel, and functions to cut operands."""
        of = self.convolution
        _, features, *window = of.rhs_spec
        padding = []
        for axis, first, last, (low, high), dilation in zip(
            window, start[1:], stop[1:], of.padding, of.rhs_dilation, strict=True
        ):
            behind = rhs[axis] - last
            padding.append((low - first * dilation, high - behind * dilation))

        def cut_rhs(x):
            for axis, first, last in zip((features, *window), start, stop, strict=True):
                x = lax.slice_in_dim(x, first, last, axis=axis)
            return x

        def cut_lhs(x):
            axis, shape = of.lhs_spec[1], x.shape
            grouped = (
                *shape[:axis],
                of.feature_groups,
                rhs[features],
                *shape[axis + 1 :],
            )
            x = lax.slice_in_dim(x.reshape(grouped), start[0], stop[0], axis=axis + 1)
            return x.reshape(*shape[:axis], -1, *shape[axis + 1 :])

        part = dataclasses.replace(of, padding=tuple(padding))
        return Conv(part, self.out_sharding), cut_lhs, cut_rhs

    def unit_axes(self, side):
        """All axes that the result lacks."""
        kept = self._kept(side)
        ndim = len(self.convolution.lhs_spec)
        return tuple(axis for axis in range(ndim) if axis != kept)

    def scale_to_output(self, side, scale):
        kept, shape = self._kept(side), [1] * scale.ndim
        if kept is not None:
            axis = self.convolution.out_spec[0 if side == "lhs" else 1]
            shape[axis] = scale.shape[kept]
        return scale.reshape(shape)

    def _kept(self, side: Side) -> int | None:
        """The axis of an operand in the result; None for lhs with batch groups."""
        of = self.convolution
        if side == "lhs":
            return None if of.batch_groups > 1 else of.lhs_spec[0]
        return of.rhs_spec[0]
