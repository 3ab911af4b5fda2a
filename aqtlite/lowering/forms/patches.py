"""int8 convolutions as contractions of patches.

A patch is the part of lhs under the window at one position of the result; the
convolution contracts all patches with the kernel. CPUs take a block of examples at a
time, so that its patches stay in the cache. The padding of lhs is 0, or 128 for
processors that multiply uint8 by int8 (`cpu.unsigned_dot`).

A convolution with a kernel larger than its result, such as the gradient of a kernel,
contracts along the kernel's window: a patch is then the part of lhs that the kernel
meets for one position of the result. With one channel per group there is nothing to
contract, and the convolution is a sum of products.
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aqtlite.lowering.forms import cpu, gpu, plain, processor
from aqtlite.lowering.forms.convolution import Convolution
from aqtlite.lowering.target import Target

Axes = tuple[int, ...]

# Bytes of patches at a time, so that they stay in the L2 cache of a core.
_BLOCK_BYTES = 2**20

# Windows with more positions are not unrolled, where that is done.
_UNROLLED = 256

# More slices are written in a loop: XLA:CPU takes a second to compile the concatenation
# of 30 of them.
_FEW_SLICES = 4
_FEW_STRIDED_SLICES = 9

# LLVM unrolls, and then vectorizes, a sum of this many terms.
_TERMS = 8

_MATMUL = ((1,), (0,)), ((), ())
_LEADING = ((0,), (0,)), ((), ())


def conv(
    lhs: jax.Array, rhs: jax.Array, convolution: Convolution, target: Target
) -> jax.Array:
    """Convolves int8 with int8 to int32."""
    shape = convolution.output_shape(lhs.shape, rhs.shape)
    result = tuple(shape[axis] for axis in convolution.out_spec[2:])
    o, i, *window = convolution.rhs_spec
    sizes = tuple(rhs.shape[axis] for axis in window)
    # Symbolic sizes (jax.export) cannot be compared.
    is_known = all(isinstance(n, int) for n in (*lhs.shape, *rhs.shape))
    if not (is_known and window):
        return convolution(lhs, rhs, jnp.int32)
    geometry = _Geometry(convolution, sizes, result, target)
    groups = max(convolution.feature_groups, convolution.batch_groups)
    is_unrolled = groups > 1 or not geometry.is_on_one_cpu
    if is_unrolled and min(map(math.prod, (sizes, result))) > _UNROLLED:
        return convolution(lhs, rhs, jnp.int32)
    x = lhs.transpose(_features_last(convolution.lhs_spec))
    w = rhs.transpose((*window, i, o))
    if convolution.feature_groups > 1:
        out = _in_feature_groups(x, w, geometry, convolution.feature_groups)
    elif convolution.batch_groups > 1:
        out = _in_batch_groups(x, w, geometry, convolution.batch_groups)
    else:
        out = _ungrouped(x, w, geometry)
    order = _features_last(convolution.out_spec)
    return out.transpose([order.index(axis) for axis in range(out.ndim)])


def _features_last(spec: Axes) -> Axes:
    return (spec[0], *spec[2:], spec[1])


@dataclasses.dataclass(frozen=True)
class _Geometry:
    """The spatial part of a convolution, and its target.

    Arrays are laid out as ``(batch, *space, features)`` and ``(*window, input features,
    output features)``.
    """

    convolution: Convolution
    window: Axes
    """The spatial sizes of the kernel."""

    result: Axes
    """The spatial sizes of the result."""

    target: Target

    @property
    def is_on_one_cpu(self) -> bool:
        return self.target.platform == "cpu" and self.target.partitions == 1

    def pad(self, x: jax.Array, value: int) -> jax.Array:
        """Pads and dilates ``(batch, *space, features)``."""
        of = self.convolution
        amounts = [
            (low, high, dilation - 1)
            for (low, high), dilation in zip(of.padding, of.lhs_dilation, strict=True)
        ]
        if not any(map(any, amounts)):
            return x
        none = (0, 0, 0)
        return lax.pad(x, np.asarray(value, x.dtype), (none, *amounts, none))

    def slices(
        self, x: jax.Array, first: int | None = None, *, by_result: bool = False
    ) -> list[jax.Array]:
        """Slices lhs for each position of the window, over all positions of the result.

        Args:
            x: padded lhs, ``(batch, *space, features)``.
            first: number of positions of the result along the first spatial axis, None
                for all.
            by_result: whether to exchange the window and the result.
        """
        at, over, counts = self.steps(first, by_result)
        found = []
        for position in itertools.product(*map(range, at[0])):
            starts = [k * step for k, step in zip(position, at[1], strict=True)]
            stops = [
                start + (count - 1) * step + 1
                for start, count, step in zip(starts, counts, over[1], strict=True)
            ]
            found.append(
                lax.slice(
                    x,
                    (0, *starts, 0),
                    (x.shape[0], *stops, x.shape[-1]),
                    (1, *over[1], 1),
                )
            )
        return found

    def patches(
        self, x: jax.Array, first: int, *, by_result: bool = False
    ) -> jax.Array:
        """Returns the slices of `slices` side by side, along the last axis."""
        at, over, counts = self.steps(first, by_result)
        number, features = math.prod(at[0]), x.shape[-1]
        few = _FEW_SLICES if max(over[1]) == 1 else _FEW_STRIDED_SLICES
        if number <= few or not self.is_on_one_cpu:
            slices = self.slices(x, first, by_result=by_result)
            return lax.concatenate(slices, x.ndim - 1)
        steps = zip(counts, over[1], strict=True)
        sizes, zero = [(count - 1) * step + 1 for count, step in steps], np.int32(0)

        def write(k: jax.Array, out: jax.Array) -> jax.Array:
            shape = (len(x), *sizes, features)
            part = plain.part_at(x, [zero, *plain.place_of(k, *at), zero], shape)
            part = lax.slice(part, (0,) * x.ndim, shape, (1, *over[1], 1))
            start = [*[zero] * (x.ndim - 1), lax.mul(k, np.int32(features))]
            return plain.with_part_at(out, start, part)

        out = lax.full_like(x, 0, shape=(len(x), *counts, number * features))
        return lax.fori_loop(zero, np.int32(number), write, out)

    def steps(
        self, first: int | None, by_result: bool
    ) -> tuple[tuple[Axes, Axes], tuple[Axes, Axes], list[int]]:
        """Returns the numbers and steps of slices, and of elements in a slice.

        The last result are the numbers of elements with `first` of them.
        """
        of = self.convolution
        at, over = (self.window, of.rhs_dilation), (self.result, of.strides)
        if by_result:
            at, over = over, at
        counts = list(over[0])
        if first is not None:
            counts[0] = first
        return at, over, counts


def _ungrouped(x: jax.Array, w: jax.Array, geometry: _Geometry) -> jax.Array:
    if math.prod(geometry.window) > math.prod(geometry.result):
        return _contract_window(x, w, geometry)
    return _contract_patches(x, w, geometry)


def _contract_patches(x: jax.Array, w: jax.Array, geometry: _Geometry) -> jax.Array:
    """Contracts all patches with the kernel."""
    kernel = w.reshape(-1, w.shape[-1])
    products, columns = kernel.shape
    positions = x.shape[0] * math.prod(geometry.result)
    is_unsigned = (
        geometry.is_on_one_cpu
        and processor.multiplies_unsigned(positions)
        and columns > 1
        and positions > 1
    )
    if is_unsigned:
        x = cpu.offset_by_128(x)
    x = geometry.pad(x, 128 if is_unsigned else 0)

    def contract(x: jax.Array, rows: int) -> jax.Array:
        patches = geometry.patches(x, rows)
        matrix = patches.reshape(-1, products)
        if is_unsigned:
            return cpu.mixed_dot(matrix, kernel, _MATMUL)
        return _dot(matrix, kernel, geometry.target)

    first = geometry.result[0]
    position = products * math.prod(geometry.result[1:])
    examples, rows = _block(x.shape[0], first, position, geometry)
    if (examples, rows) == (x.shape[0], first):
        out = contract(x, rows)
    else:
        out = _mapped(contract, x, examples, rows, geometry)
    out = out.reshape(x.shape[0], *geometry.result, columns)
    if not is_unsigned:
        return out
    excess = cpu.mixed_dot(jnp.full((2, products), 128, x.dtype), kernel, _MATMUL)
    excess = lax.index_in_dim(excess, 0, keepdims=False)
    return lax.sub(out, lax.expand_dims(excess, range(out.ndim - 1)))


def _block(examples: int, rows: int, size: int, geometry: _Geometry) -> tuple[int, int]:
    """The numbers of examples, and of rows of an example, to contract at a time.

    Args:
        examples: number of examples.
        rows: number of rows of an example.
        size: size of the patches of a row, in bytes.
        geometry: geometry of the convolution.
    """
    is_pointwise = math.prod(geometry.window) == 1 or math.prod(geometry.result) == 1
    if not geometry.is_on_one_cpu or is_pointwise:
        return examples, rows
    if rows * size > _BLOCK_BYTES * 2:
        return 1, _divisor(rows, _BLOCK_BYTES // size)
    return _divisor(examples, _BLOCK_BYTES // (rows * size)), rows


def _divisor(size: int, limit: int) -> int:
    """The largest divisor of a size up to a limit, at least 1."""
    return next(n for n in range(max(1, min(size, limit)), 0, -1) if size % n == 0)


def _mapped(contract, x, examples, rows, geometry):
    """Contracts blocks of padded examples in a loop."""
    per_example = geometry.result[0] // rows
    count = x.shape[0] // examples * per_example

    def block(index):
        return contract(_rows_of(x, index, examples, rows, geometry), rows)

    return lax.map(block, jnp.arange(count))


def _rows_of(x, index, examples, rows, geometry, *, by_result=False):
    """The part of padded examples that a block of rows needs."""
    at, over, _ = geometry.steps(None, by_result)
    window, dilation = at[0][0], at[1][0]
    total, stride = over[0][0], over[1][0]
    per_example = total // rows
    example, row = index // per_example, index % per_example
    space = (rows - 1) * stride + (window - 1) * dilation + 1
    if rows == total:
        space = x.shape[1]
    start = example * examples, row * (rows * stride)
    zeros = (jnp.zeros_like(index),) * (x.ndim - 2)
    return lax.dynamic_slice(x, (*start, *zeros), (examples, space, *x.shape[2:]))


def _dot(lhs: jax.Array, rhs: jax.Array, target: Target) -> jax.Array:
    if target.partitions > 1:
        return plain.dot(lhs, rhs, _MATMUL)
    if target.platform == "cpu":
        return cpu.dot(lhs, rhs, _MATMUL)
    return gpu.dot(lhs, rhs, _MATMUL, target)


def _contract_window(x: jax.Array, w: jax.Array, geometry: _Geometry) -> jax.Array:
    """Contracts the kernel with the part of lhs that it meets, by result position.

    The features are treated as examples, and summed over in blocks.
    """
    x, w = geometry.pad(x.swapaxes(0, -1), 0), jnp.moveaxis(w, -2, 0)
    batch, columns = x.shape[-1], w.shape[-1]
    first = geometry.window[0]

    def contract(x: jax.Array, w: jax.Array, rows: int) -> jax.Array:
        met = geometry.patches(x, rows, by_result=True)
        left, right = w.reshape(-1, columns), met.reshape(-1, met.shape[-1])
        if geometry.is_on_one_cpu:
            return cpu.dot(left, right, _LEADING)
        return _dot(left.T, right, geometry.target)

    size = math.prod(geometry.window[1:]) * math.prod(geometry.result) * batch
    examples, rows = _block(x.shape[0], first, size, geometry)
    if (examples, rows) == (x.shape[0], first):
        out = contract(x, w, rows)
    else:
        steps = x.shape[0] // examples * (first // rows)
        parts = w.reshape(steps, examples, rows, *w.shape[2:])

        def add(total, step):
            index, part = step
            block = _rows_of(x, index, examples, rows, geometry, by_result=True)
            return total + contract(block, part, rows), None

        shape = columns, math.prod(geometry.result) * batch
        start = lax.full_like(x, 0, jnp.int32, shape)
        out, _ = lax.scan(add, start, (jnp.arange(steps), parts))
    out = out.reshape(columns, *geometry.result, batch)
    return out.swapaxes(0, -1)


def _in_feature_groups(x, w, geometry, groups):
    if w.shape[-2] == 1:
        return _sum_of_taps(x, w, geometry, groups)
    x = jnp.moveaxis(_split(x, -1, groups), -2, 0)
    return _each_group(x, w, geometry, groups)


def _in_batch_groups(x, w, geometry, groups):
    if x.shape[0] == groups:
        return _sum_over_window(x, w, geometry, groups)
    return _each_group(_split(x, 0, groups), w, geometry, groups)


def _each_group(x, w, geometry, groups):
    """Contracts each group; those of `x` are along its first axis."""
    w = jnp.moveaxis(_split(w, -1, groups), -2, 0)
    if geometry.is_on_one_cpu:
        # A CPU has no fast batch of contractions.
        out = lax.map(lambda one: _ungrouped(one[0], one[1], geometry), (x, w))
    else:
        out = jax.vmap(lambda x, w: _ungrouped(x, w, geometry))(x, w)
    out = jnp.moveaxis(out, 0, -2)
    return out.reshape(*out.shape[:-2], -1)


def _split(x: jax.Array, axis: int, groups: int) -> jax.Array:
    axis %= x.ndim
    return x.reshape(*x.shape[:axis], groups, -1, *x.shape[axis + 1 :])


def _sum_of_taps(x, w, geometry, groups):
    """Sums over the window for each channel (depthwise)."""
    kernel = w.astype(jnp.int32).reshape(-1, groups, w.shape[-1] // groups)
    taps = geometry.slices(geometry.pad(x, 0))
    products = (
        jnp.expand_dims(tap.astype(jnp.int32), -1) * one
        for tap, one in zip(taps, kernel, strict=True)
    )
    out = sum(products, start=jnp.int32(0))
    return out.reshape(*out.shape[:-2], -1)


def _sum_over_window(x, w, geometry, groups):
    """Sums over all features and the window for each channel (depthwise).

    A sum over leading axes is fast with few terms at a time.
    """
    x = geometry.pad(x.swapaxes(0, -1), 0)
    w = jnp.moveaxis(w, -2, 0)
    w = w.reshape(*w.shape[:-1], groups, w.shape[-1] // groups)
    rows = geometry.window[0]
    terms = _divisor(rows, _TERMS)

    def of_example(x, w):
        w = w.astype(jnp.int32)
        sums = []
        for met in geometry.slices(x[None], by_result=True):
            products = jnp.expand_dims(met[0].astype(jnp.int32), -1) * w
            parts = products.reshape(rows // terms, terms, *products.shape[1:])
            sums.append(parts.sum(1).sum(0))
        return jnp.stack(sums)

    if geometry.is_on_one_cpu:

        def add(total, example):
            return total + of_example(*example), None

        shape = jax.eval_shape(of_example, x[0], w[0])
        start = lax.full_like(x, 0, jnp.int32, shape.shape)
        out, _ = lax.scan(add, start, (x, w))
    else:
        out = jax.vmap(of_example)(x, w).sum(0)
    out = out.sum(tuple(range(1, out.ndim - 2)))
    return out.reshape(1, *geometry.result, -1)
