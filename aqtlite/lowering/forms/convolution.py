"""The static arguments of a convolution, from which all its forms are made."""

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

Axes = tuple[int, ...]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Convolution:
    """The static arguments of a `lax.conv_general_dilated`.

    >>> Convolution.of((2, 8, 8, 3), (3, 3, 3, 4), (1, 1), "SAME", None, None,
    ...                ("NHWC", "HWIO", "NHWC")).padding
    ((1, 1), (1, 1))
    """

    strides: Axes
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: Axes
    rhs_dilation: Axes
    lhs_spec: Axes
    """Axes of lhs: batch, features, spatial axes."""

    rhs_spec: Axes
    """Axes of rhs: output features, input features, spatial axes."""

    out_spec: Axes
    """Axes of the result: batch, features, spatial axes."""

    feature_groups: int = 1
    batch_groups: int = 1

    @classmethod
    def of(
        cls,
        lhs_shape: Sequence[int],
        rhs_shape: Sequence[int],
        window_strides: Sequence[int],
        padding: Any,
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        dimension_numbers: Any = None,
        feature_group_count: int = 1,
        batch_group_count: int = 1,
    ) -> "Convolution":
        """Makes a convolution from the arguments of `lax.conv_general_dilated`.

        Raises:
            ValueError: if the arguments do not fit the operands.
            TypeError: if an argument has another type.
        """
        specs = lax.conv_dimension_numbers(lhs_shape, rhs_shape, dimension_numbers)
        rank = len(lhs_shape) - 2
        lhs_dilation = (1,) * rank if lhs_dilation is None else lhs_dilation
        rhs_dilation = (1,) * rank if rhs_dilation is None else rhs_dilation
        strides = _steps("window_strides", window_strides, lhs_shape)
        lhs_dilation = _steps("lhs_dilation", lhs_dilation, lhs_shape)
        rhs_dilation = _steps("rhs_dilation", rhs_dilation, lhs_shape)
        if isinstance(padding, str):
            if padding.upper() not in ("SAME", "SAME_LOWER", "VALID"):
                raise ValueError(
                    "padding must be 'SAME', 'SAME_LOWER', 'VALID' or a sequence of "
                    f"(low, high) pairs, got {padding!r}"
                )
            if set(lhs_dilation) - {1}:
                raise ValueError(
                    f"padding={padding!r} with lhs_dilation={lhs_dilation}: "
                    "give a sequence of (low, high) pairs"
                )
            window = [rhs_shape[axis] for axis in specs.rhs_spec[2:]]
            sizes = np.asarray([lhs_shape[axis] for axis in specs.lhs_spec[2:]])
            window = [dilated(k, d) for k, d in zip(window, rhs_dilation, strict=True)]
            found = lax.padtype_to_pads(sizes, window, np.asarray(strides), padding)
            pairs = tuple((_amount(low), _amount(high)) for low, high in found)
        else:
            pairs = _pairs(padding)
        lhs_spec, rhs_spec, out_spec = (tuple(map(int, spec)) for spec in specs)
        return cls(
            strides=strides,
            padding=pairs,
            lhs_dilation=lhs_dilation,
            rhs_dilation=rhs_dilation,
            lhs_spec=lhs_spec,
            rhs_spec=rhs_spec,
            out_spec=out_spec,
            feature_groups=_count("feature_group_count", feature_group_count),
            batch_groups=_count("batch_group_count", batch_group_count),
        )

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        accumulator: DTypeLike | None = None,
        out_sharding: NamedSharding | None = None,
        precision: lax.PrecisionLike = None,
    ) -> jax.Array:
        """Evaluates the convolution by XLA's, with sums in `accumulator`."""
        if not all(isinstance(n, int) for pair in self.padding for n in pair):
            # `lax.conv_general_dilated` takes no symbolic amounts of padding.
            run, lhs = self.of_padded(), self.pad(lhs, 0)
            return run(lhs, rhs, accumulator, out_sharding, precision)
        return lax.conv_general_dilated(
            lhs,
            rhs,
            self.strides,
            self.padding,
            self.lhs_dilation,
            self.rhs_dilation,
            lax.ConvDimensionNumbers(self.lhs_spec, self.rhs_spec, self.out_spec),
            self.feature_groups,
            self.batch_groups,
            precision=precision,
            preferred_element_type=accumulator,
            out_sharding=out_sharding,
        )

    def output_shape(
        self, lhs_shape: Sequence[int], rhs_shape: Sequence[int]
    ) -> tuple[int, ...]:
        """Returns the shape of the result.

        Raises:
            ValueError: if the operands do not fit; JAX raises TypeError for some.
        """
        return _output_shape(self, tuple(lhs_shape), tuple(rhs_shape))

    def for_dlhs(self, lhs: Shape, rhs: Shape, out: Shape) -> "Convolution":
        """Returns the convolution of the output gradient with rhs, for lhs's gradient.

        It takes rhs reversed in space, with its groups, if any, in front of its input
        features. With batch groups, its result has the groups in front of its features
        instead of its examples.

        Args:
            lhs: shape of lhs.
            rhs: shape of rhs.
            out: shape of the result.
        """
        padding = tuple(
            (k - low - 1, i + low - j)
            for i, k, j, low in self._dilated_sizes(lhs, rhs, out)
        )
        output_features, input_features, *window = self.rhs_spec
        return Convolution(
            strides=self.lhs_dilation,
            padding=padding,
            lhs_dilation=self.strides,
            rhs_dilation=self.rhs_dilation,
            lhs_spec=self.out_spec,
            rhs_spec=(input_features, output_features, *window),
            out_spec=self.lhs_spec,
            feature_groups=max(self.feature_groups, self.batch_groups),
        )

    def for_drhs(self, lhs: Shape, rhs: Shape, out: Shape) -> "Convolution":
        """Returns the convolution of lhs with the output gradient, for rhs's gradient.

        Args:
            lhs: shape of lhs.
            rhs: shape of rhs.
            out: shape of the result.
        """
        padding = tuple(
            (low, j + k - i - low - 1)
            for i, k, j, low in self._dilated_sizes(lhs, rhs, out)
        )
        (examples, features, *space), kernel = self.lhs_spec, self.rhs_spec
        return Convolution(
            strides=self.rhs_dilation,
            padding=padding,
            lhs_dilation=self.lhs_dilation,
            rhs_dilation=self.strides,
            lhs_spec=(features, examples, *space),
            rhs_spec=(self.out_spec[1], self.out_spec[0], *self.out_spec[2:]),
            out_spec=(kernel[1], kernel[0], *kernel[2:]),
            feature_groups=self.batch_groups,
            batch_groups=self.feature_groups,
        )

    def _dilated_sizes(
        self, lhs: Shape, rhs: Shape, out: Shape
    ) -> list[tuple[int, int, int, int]]:
        """Dilated sizes of each spatial axis in lhs, rhs and result, and the padding.

        The sizes in the result are dilated by the strides.
        """
        steps = self.lhs_dilation, self.rhs_dilation, self.strides
        specs = self.lhs_spec, self.rhs_spec, self.out_spec
        sizes = [
            [
                dilated(shape[axis], step)
                for axis, step in zip(spec[2:], by, strict=True)
            ]
            for shape, spec, by in zip((lhs, rhs, out), specs, steps, strict=True)
        ]
        lows = [low for low, _ in self.padding]
        return list(zip(*sizes, lows, strict=True))

    def products(self, rhs_shape: Sequence[int]) -> int:
        """Returns the number of products in each element of the result."""
        features, *window = self.rhs_spec[1:]
        return math.prod(rhs_shape[axis] for axis in (features, *window))

    def of_padded(self) -> "Convolution":
        """Returns the convolution of an lhs that `pad` has padded."""
        rank = len(self.strides)
        return dataclasses.replace(
            self, padding=((0, 0),) * rank, lhs_dilation=(1,) * rank
        )

    def pad(self, lhs: jax.Array, value: Any) -> jax.Array:
        """Pads and dilates lhs.

        Args:
            lhs: any dtype.
            value: padding value, which represents zero.
        """
        amounts = [(0, 0, 0)] * lhs.ndim
        spatial = zip(self.lhs_spec[2:], self.padding, self.lhs_dilation, strict=True)
        for axis, (low, high), dilation in spatial:
            amounts[axis] = low, high, dilation - 1
        if not any(map(any, amounts)):
            return lhs
        return lax.pad(lhs, jnp.asarray(value, lhs.dtype), amounts)


def _pairs(padding: Any) -> tuple[tuple[int, int], ...]:
    """Returns the padding of each spatial axis.

    Raises:
        ValueError: if `padding` is not a sequence of pairs of ints.
    """
    try:
        return tuple(
            (operator.index(low), operator.index(high)) for low, high in padding
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            "padding must be 'SAME', 'SAME_LOWER', 'VALID' or a sequence of "
            f"(low, high) pairs, got {padding!r}"
        ) from error


def _amount(padding: Any) -> Any:
    """Returns an amount of padding as an int, unless it is symbolic (`jax.export`)."""
    return padding if jax.export.is_symbolic_dim(padding) else operator.index(padding)


def dilated(size: int, dilation: int) -> int:
    """Returns the size of an axis after dilation."""
    return 0 if size == 0 else (size - 1) * dilation + 1


def _steps(name: str, steps: Any, lhs_shape: Sequence[int]) -> Axes:
    """Returns strides or dilations as integers.

    Raises:
        TypeError: if `steps` is not a sequence of integers.
        ValueError: if they are not positive, or not one for each spatial axis.
    """
    rank = len(lhs_shape) - 2
    wanted = (
        f"{name} must be {rank} positive integers, one for each spatial axis of an lhs "
        f"of shape {tuple(lhs_shape)}, got {steps!r}"
    )
    try:
        found = tuple(map(operator.index, steps))
    except TypeError as error:
        raise TypeError(wanted) from error
    if len(found) != rank or min(found, default=1) < 1:
        raise ValueError(wanted)
    return found


def _count(name: str, count: Any) -> int:
    """Returns a number of groups as an int; `output_shape` checks its value.

    Raises:
        TypeError: if `count` is not an integer.
    """
    try:
        return operator.index(count)
    except TypeError as error:
        raise TypeError(f"{name} must be an integer, got {count!r}") from error


@functools.lru_cache(maxsize=4096)
def _output_shape(convolution: Convolution, lhs: Shape, rhs: Shape) -> Shape:
    operands = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (lhs, rhs))
    return tuple(jax.eval_shape(convolution, *operands).shape)
