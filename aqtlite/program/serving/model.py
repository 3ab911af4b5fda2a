"""The interface to a framework: a model that says what its calls contract."""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core
from jax.sharding import PartitionSpec

from aqtlite import config
from aqtlite.jaxpr import dependencies
from aqtlite.jaxpr.replacement import Location
from aqtlite.jaxpr.sites import Origin
from aqtlite.jaxpr.tracing import is_array
from aqtlite.program.serving.contraction import Contraction, OperandKey
from aqtlite.program.serving.frozen_record import RECORD, FrozenRecord, Operand
from aqtlite.program.serving.placeholder import Placeholder
from aqtlite.program.serving.statistics_uses import Uses
from aqtlite.shapes.dimension_numbers import Axes
from aqtlite.shapes.sharding import explicit_spec


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


class ParameterAxis(NamedTuple):
    """An axis of a parameter, or of a buffer."""

    parameter: Parameter | Buffer
    axis: int


def parameters_of(
    params: Any, is_box: Callable[[Any], bool] | None = None
) -> tuple[Parameter, ...]:
    """Returns the leaves of the parameters.

    Args:
        params: pytree of arrays, their shapes, or numbers.
        is_box: whether a node is a box of metadata around parameters.

    Raises:
        TypeError: if there is anything else in it.
    """
    paths = [
        (path, (*path, *below), leaf)
        for path, node in jax.tree.leaves_with_path(params, is_leaf=is_box)
        for below, leaf in jax.tree.leaves_with_path(node)
    ]
    for path, _, leaf in paths:
        if not is_array(leaf) and not isinstance(leaf, int | float | complex):
            raise TypeError(
                f"params holds {leaf!r} at {'/'.join(map(_name, path))!r}, which is no "
                "array: close over it, as over what eqx.partition(module, eqx.is_array)"
                " gives beside arrays"
            )
    return tuple(
        Parameter(
            number=number,
            path=tuple(map(_name, path)) or ("params",),
            key_path=key_path,
            shape=np.shape(leaf),
            dtype=jax.dtypes.result_type(leaf),
            spec=explicit_spec(leaf),
            is_weakly_typed=not is_array(leaf) or getattr(leaf, "weak_type", False),
        )
        for number, (path, key_path, leaf) in enumerate(paths)
    )


def _name(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)


def buffers_of(others: Any) -> dict[Buffer, Any]:
    """Returns the leaves of variables that are no parameters, with their values."""
    found = jax.tree.leaves_with_path(others, is_leaf=_is_none)
    return {Buffer(i, key_path): leaf for i, (key_path, leaf) in enumerate(found)}


def buffers_in(inputs: Any, buffers: Iterable[Buffer]) -> dict[int, Buffer]:
    """Returns buffers by the indices of the inputs that they are.

    Args:
        inputs: the variables, as `jaxpr.tracing.Traced.inputs` has them.
        buffers: of `buffers_of` the variables.
    """
    numbers = jax.tree.leaves(inputs, is_leaf=_is_none)
    pairs = zip(numbers, buffers, strict=True)
    return {i: buffer for i, buffer in pairs if i is not None}


def _is_none(x: Any) -> bool:
    return x is None


class Place(NamedTuple):
    """An input of an equation of a jaxpr."""

    equation: Location
    number: int
    """Index of the input among those of the equation."""


@dataclasses.dataclass(frozen=True)
class FoundOperand:
    """An operand of a contraction that is quantized there, in the trace of one call."""

    key: OperandKey
    operand: Operand
    cfg: config.DotGeneral
    batch_axes: Axes
    frozen_operands: str
    """The operands to freeze, as the contraction says."""

    name: str | None
    """The name of its frozen weights, in place of their parameters'."""

    obstacle: str | None
    """The reason why no weight can be frozen here, if there is one."""

    is_injected: bool
    """The contraction sees its operands alone, and not how they are made."""

    place: Place = Place((), 0)
    identity: str | None = None
    """Digest of its computation, if it is made of parameters and constants alone."""

    parameters: frozenset[Parameter] = frozenset()
    """The parameters that it depends on."""

    depends_on_buffers: bool = False
    """It depends on variables that are no parameters."""

    depends_on_inputs: bool = False

    @classmethod
    def of(
        cls,
        contraction: Contraction,
        key: OperandKey,
        obstacle: str | None,
        *,
        is_injected: bool,
    ) -> "FoundOperand":
        """An operand of which nothing is known yet but the contraction."""
        return cls(
            key=key,
            operand=contraction.operand(key.side),
            cfg=contraction.cfg,
            batch_axes=contraction.operation.axes(key.side).batch,
            frozen_operands=contraction.frozen_operands,
            name=contraction.name,
            obstacle=obstacle,
            is_injected=is_injected,
        )

    def made_of(
        self,
        origin: Origin,
        place: Place,
        parameters: Mapping[int, Parameter],
        buffers: Collection[int],
    ) -> "FoundOperand":
        """The operand at a place of a jaxpr.

        Args:
            origin: what it comes from.
            place: place of it, or of the equation that gives it a name.
            parameters: the inputs of the jaxpr that are parameters, by index.
            buffers: indices of those that are other variables of the model.
        """
        inputs = origin.inputs
        return dataclasses.replace(
            self,
            place=place,
            identity=origin.identity,
            parameters=frozenset(parameters[i] for i in inputs & parameters.keys()),
            depends_on_buffers=not inputs.isdisjoint(buffers),
            depends_on_inputs=bool(inputs - parameters.keys() - {*buffers}),
        )

    @property
    def is_required(self) -> bool:
        """Whether the contraction names it as one to freeze."""
        return self.frozen_operands in (self.key.side, "both")

    def __str__(self) -> str:
        return f"{self.operand} of {'/'.join(self.key.path) or '/'}"


@dataclasses.dataclass(frozen=True)
class Discovery:
    """The operands in the trace of one call."""

    jaxpr: core.ClosedJaxpr
    parameters: Mapping[int, Parameter]
    """The inputs that are parameters, by index."""

    operands: tuple[FoundOperand, ...]
    num_contractions: int
    """Those in float included."""

    learned: frozenset[Parameter]
    """The parameters of learned calibrations."""

    def read_parameters(
        self, frozen: Collection[OperandKey] = ()
    ) -> frozenset[Parameter]:
        """Returns the parameters that the call reads if some operands are frozen."""
        unread: dict[Location, set[int]] = {}
        for one in self.operands:
            if one.key in frozen:
                unread.setdefault(one.place.equation, set()).add(one.place.number)
        read = dependencies.read_inputs(self.jaxpr, self.parameters.keys(), unread)
        return frozenset(self.parameters[i] for i in read)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["key"]
)
@dataclasses.dataclass(frozen=True)
class StoredOperand:
    """Arrays that were stored of an operand, which become outputs of a trace."""

    key: OperandKey
    arrays: Any


@dataclasses.dataclass(frozen=True)
class CallTrace:
    """The trace of one call of a model."""

    jaxpr: core.ClosedJaxpr
    parameters: Mapping[int, Parameter]
    """The inputs that are parameters, by index."""

    buffers: Mapping[int, Buffer]
    """The inputs that are other variables of the model, by index."""

    stored: tuple[StoredOperand, ...]
    """With the index of an output of the jaxpr in place of every array."""


@dataclasses.dataclass(frozen=True)
class StoredWeight:
    """A frozen weight as it is stored, and where its axes come from."""

    module: tuple[str, ...]
    """The path of the module that contracts it."""

    name: str
    record: FrozenRecord
    values: dict[str, Any]
    """The `QTensor` by its side, and values of floats where something stayed one."""

    axes: Callable[[], Sequence[ParameterAxis | None]]
    """Returns for each axis of the integers the axis of a parameter that it is, if so.
    """

    @property
    def entry(self) -> dict[str, Any]:
        """The entry in the collection of frozen weights."""
        return {RECORD: self.record, **self.values}


class Model(abc.ABC):
    """A model with its variables, and the calls of it that will be served."""

    def __init__(
        self,
        params: Any,
        others: Any,
        num_calls: int,
        is_box: Callable[[Any], bool] | None = None,
    ):
        """Takes variables, or their shapes.

        Args:
            params: the parameters.
            others: the other variables.
            num_calls: number of calls.
            is_box: whether a node is a box of metadata around parameters.
        """
        self.parameters = parameters_of(params, is_box)
        self.buffers = buffers_of(others)
        self.values: dict[Parameter | Buffer, Any] = {}
        self.values.update(self.buffers.items())
        leaves = jax.tree.leaves(params)
        self.values.update(zip(self.parameters, leaves, strict=True))
        self.num_calls = num_calls
        self.uses_of_statistics = Uses()
        """Those of the calls that were discovered."""

    @abc.abstractmethod
    def discover(self, call: int) -> Discovery:
        """Returns what the operands of the contractions of a call are made of."""

    @abc.abstractmethod
    def record(self, call: int, weights: Sequence[FoundOperand]) -> CallTrace:
        """Traces a call that stores the `WeightOutputs` of weights.

        Args:
            call: index of the call, which was discovered.
            weights: operands of the call, which are weights.
        """

    def record_fingerprints(
        self,
        call: int,
        keys: Collection[OperandKey],
        frozen: Mapping[Parameter, Placeholder],
    ) -> CallTrace:
        """Traces a call that stores the fingerprints of weights in serving.

        Models have it whose contractions may be injected.

        Args:
            call: index of the call.
            keys: keys of weights of injected contractions.
            frozen: placeholders to trace in place of parameters.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def serving(
        self,
        stored: Sequence[StoredWeight],
        frozen: Mapping[Parameter, Placeholder],
    ) -> Any:
        """Returns the serving variables, or their shapes if the values are.

        Args:
            stored: the frozen weights.
            frozen: what stands for the parameters that nothing else reads.
        """

    @abc.abstractmethod
    def fix_scales(self, serving: Any) -> Any:
        """Returns serving variables with scales in place of statistics of operands."""

    def quantized_elsewhere(self) -> Mapping[Parameter, str]:
        """Returns parameters that calls quantize unseen, and why that is."""
        return {}
