"""Config of the states of optimizers that are held in few bits between steps."""

import dataclasses
import re

from aqtlite.config import representation
from aqtlite.config.blocks import Blocks
from aqtlite.config.tensor import Tensor
from aqtlite.numerics import DynamicTree, fields

_BLOCKS = Blocks(size=256, fit=True)
_FIRST = Tensor(numerics=DynamicTree(), blocks=_BLOCKS)
_SECOND = Tensor(numerics=DynamicTree(signed=False), blocks=_BLOCKS)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class OptimizerStates(representation.CompactRepr):
    """How `aqtlite.quantize_optimizer` holds the arrays of a state between steps.

    By default in 8 bits on the dynamic grid, with a scale for each block of 256
    elements (Dettmers et al. 2021, arXiv:2110.02861). As there, small arrays and those
    of embeddings stay in float. A regular expression is for the whole path of an array
    in the state, such as ``0/mu/Dense_0/kernel``.

    >>> OptimizerStates(min_size=0)
    OptimizerStates(min_size=0)

    Raises:
        TypeError: if a field is of another type than declared.
        ValueError: if a pattern is not a regular expression, or if a tensor does not
            quantize, or has a scale that it takes from earlier steps.
    """

    first: Tensor = _FIRST
    """Config of first moments, which have both signs. Blocks lie along one axis."""

    second: Tensor = _SECOND
    """Config of second moments, which are never negative."""

    first_moments: str | None = None
    """Regular expression for the paths of first moments. None: the fields of states
    that optax calls "mu" and "trace", whatever parameters are called."""

    second_moments: str | None = None
    """Regular expression for the paths of second moments. None: the fields that optax
    calls "nu", "nu_max" and "sum_of_squares". A path that it matches is not of a first
    moment; paths that neither matches stay in float."""

    in_float: str = r".*[Ee]mbed.*"
    """Regular expression for the paths of moments that stay in float."""

    min_size: int = 4096
    """Number of elements from which moments are quantized."""

    def __post_init__(self) -> None:
        for name in ("first", "second"):
            tensor = getattr(self, name)
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"OptimizerStates.{name} must be a config.Tensor, got {tensor!r}"
                )
            if not tensor.is_quantized:
                raise ValueError(
                    f"OptimizerStates.{name} does not quantize: to keep arrays in "
                    "float, name their paths in OptimizerStates.in_float"
                )
            needs_state = tensor.calibration.needs_state
            if needs_state or tensor.needs_noise or tensor.sparsity or tensor.rounding:
                raise ValueError(
                    f"OptimizerStates.{name}={tensor!r}: a state is rounded to "
                    "nearest, by the scale of its values alone"
                )
        for name in ("first_moments", "second_moments", "in_float"):
            pattern = getattr(self, name)
            if pattern is None and name != "in_float":
                continue
            if not isinstance(pattern, str):
                raise TypeError(
                    f"OptimizerStates.{name} must be a string, got {pattern!r}"
                )
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"OptimizerStates.{name}={pattern!r} is not a regular expression: "
                    f"{error}"
                ) from error
        fields.check(self, min_size=fields.integer(0))
