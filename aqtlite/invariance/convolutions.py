"""Float convolutions whose products are added one by one, in order.

At each position of the window, from its first one, the input features are added in
order. So a convolution has the bits of a `jax.lax.dot_general` of its window with the
kernel, as in decoding with the last inputs kept.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.invariance.contractions import UNROLLED, added
from aqtlite.lowering.forms import plain
from aqtlite.lowering.target import TargetDependent

Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Conv(TargetDependent):
    """`jax.lax.conv_general_dilated` of float32."""

    dimension_numbers: lax.ConvDimensionNumbers
    window_strides: Axes
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: Axes
    rhs_dilation: Axes
    feature_group_count: int
    batch_group_count: int

    def reference(self, lhs, rhs):
        options = {
            one.name: getattr(self, one.name) for one in dataclasses.fields(self)
        }
        return lax.conv_general_dilated(lhs, rhs, **options)

    def lowered(self, target, lhs, rhs):
        del target
        of = self.dimension_numbers
        lhs, rhs = lhs.transpose(of.lhs_spec), rhs.transpose(of.rhs_spec)
        x, kernel = self._grouped(self._padded(lhs), rhs)
        window = rhs.shape[2:]
        sizes = self._result(x.shape[3:], window)
        groups, features, examples = x.shape[:3]
        columns = kernel.shape[-1]
        positions = math.prod(sizes)
        out = jnp.zeros((groups, examples * positions, columns), jnp.float32)

        def add(number, start, out):
            rows = self._slice(x, start, sizes)
            rows = rows.reshape(groups, features, examples * positions)
            return added(out, rows, lax.dynamic_index_in_dim(kernel, number, 0, False))

        some = max(1, UNROLLED // max(1, features))

        def step(block, out):
            for i in range(some):
                number = block * np.int32(some) + np.int32(i)
                place = plain.place_of(number, window, self.rhs_dilation)
                out = add(number, place, out)
            return out

        places = list(np.ndindex(*window))
        blocks = len(places) // some if len(places) > some else 0
        if blocks:
            out = lax.fori_loop(np.int32(0), np.int32(blocks), step, out)
        for number in range(blocks * some, len(places)):
            start = np.multiply(places[number], self.rhs_dilation).astype(np.int32)
            out = add(number, [*start], out)
        return self._laid_out(out, examples, sizes)

    def _padded(self, lhs):
        """Pads and dilates ``(examples, features, *space)``."""
        amounts = [
            (*sides, dilation - 1)
            for sides, dilation in zip(self.padding, self.lhs_dilation, strict=True)
        ]
        return lax.pad(lhs, np.float32(0), [(0, 0, 0), (0, 0, 0), *amounts])

    def _grouped(self, lhs, rhs):
        """Returns ``(groups, features, examples, *space)``, and a stack of kernels.

        The kernels are ``(window, groups, features, columns)``.
        """
        groups = max(self.feature_group_count, self.batch_group_count)
        outputs, features, *window = rhs.shape
        space = lhs.shape[2:]
        if self.batch_group_count > 1:
            x = lhs.reshape(groups, -1, features, *space).swapaxes(1, 2)
        else:
            x = jnp.moveaxis(lhs.reshape(-1, groups, features, *space), 0, 2)
        shape = groups, outputs // groups, features, math.prod(window)
        return x, rhs.reshape(shape).transpose(3, 0, 2, 1)

    def _result(self, space, window):
        """Returns the spatial sizes of the result."""
        return tuple(
            max(0, (size - (count - 1) * dilation - 1) // stride + 1)
            for size, count, dilation, stride in zip(
                space, window, self.rhs_dilation, self.window_strides, strict=True
            )
        )

    def _slice(self, x, start, sizes):
        """Slices the input for one position of the window."""
        spans = (
            (size - 1) * stride + 1
            for size, stride in zip(sizes, self.window_strides, strict=True)
        )
        part = plain.part_at(x, [*[np.int32(0)] * 3, *start], (*x.shape[:3], *spans))
        strides = (1, 1, 1, *self.window_strides)
        return lax.slice(part, (0,) * part.ndim, part.shape, strides)

    def _laid_out(self, out, examples, sizes):
        """Lays out ``(groups, examples and positions, columns)`` as the result."""
        groups, _, columns = out.shape
        out = out.reshape(groups, examples, *sizes, columns)
        out = jnp.moveaxis(out, (0, -1), (1, 2))
        out = out.reshape(examples, groups * columns, *sizes)
        return out.transpose(np.argsort(self.dimension_numbers.out_spec))
