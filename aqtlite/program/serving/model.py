"""The interface to a framework: a model that can be traced call by call."""

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.extend import core
from jax.sharding import PartitionSpec

from aqtlite.program.serving.contraction import Recorder
from aqtlite.program.serving.placeholder import Placeholder


@dataclasses.dataclass(frozen=True, order=True)
class Parameter:
    """A leaf of a model's parameters."""

    number: int
    """Its place among the leaves, by which parameters compare."""

    path: tuple[str, ...] = dataclasses.field(compare=False)
    """Without the boxes of partitioning metadata."""

    key_path: tuple[Any, ...] = dataclasses.field(compare=False, repr=False)
    """The same as JAX's path in the tree of parameters, boxes included."""

    shape: tuple[int, ...] = dataclasses.field(compare=False)
    dtype: np.dtype = dataclasses.field(compare=False)
    spec: PartitionSpec | None = dataclasses.field(compare=False, default=None)
    """How it is sharded, on a mesh with explicit axes."""

    is_weakly_typed: bool = dataclasses.field(compare=False, default=False)
    """Its dtype follows that of what it meets, as a Python number's does."""

    def __str__(self) -> str:
        return "/".join(self.path)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        return self.size * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, order=True)
class Buffer:
    """A leaf of a model's variables that are no parameters."""

    number: int
    """Its place among the leaves, by which buffers compare."""

    key_path: tuple[Any, ...] = dataclasses.field(compare=False, repr=False)
    """JAX's path in the tree of these variables."""


@dataclasses.dataclass(frozen=True)
class CallTrace:
    """The trace of one call of a model."""

    jaxpr: core.ClosedJaxpr
    parameters: Mapping[int, Parameter]
    """The inputs that are parameters, by index."""

    buffers: Mapping[int, Buffer]
    """The inputs that are other variables of the model, by index."""

    stored: tuple[Any, ...]
    """The pytrees that were given to `CallingModule.store`, with the index of an output
    of the jaxpr in place of every leaf."""


class Model(abc.ABC):
    """A model with its variables, and the calls of it that will be served."""

    parameters: tuple[Parameter, ...]
    num_calls: int

    @abc.abstractmethod
    def trace(
        self,
        call: int,
        recorder: Recorder,
        frozen: Mapping[Parameter, Placeholder],
    ) -> CallTrace:
        """Traces a call.

        Args:
            call: index of the call.
            recorder: sees every contraction.
            frozen: placeholders to trace in place of parameters.
        """
