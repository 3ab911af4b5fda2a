"""What a model has and its calls contract: parameters, operands and traces."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.extend import core
from jax.sharding import PartitionSpec

from aqtlite import config, errors
from aqtlite.jaxpr import analysis, slicing
from aqtlite.jaxpr.axes import axes
from aqtlite.jaxpr.origins import Origin
from aqtlite.jaxpr.replacement import Location
from aqtlite.jaxpr.tracing import is_array
from aqtlite.operations import DotGeneral
from aqtlite.program.serving.contraction import Contraction, OperandKey
from aqtlite.program.serving.frozen_record import Operand
from aqtlite.quantization.states.state_collections import ADAPTER
from aqtlite.shapes.dimension_numbers import Axes
from aqtlite.shapes.sharding import explicit_spec


@dataclasses.dataclass(frozen=True, order=True)
class Parameter:
    """A leaf of a model's parameters."""

    number: int
    """Index among the leaves, of which adapters are the last: a conversion numbers
    parameters alike, with them and without. Parameters compare and hash by it alone."""

    path: tuple[str, ...] = dataclasses.field(compare=False)
    """Path in the tree of parameters, without the boxes of partitioning metadata."""

    key_path: tuple[Any, ...] = dataclasses.field(compare=False, repr=False)
    """JAX's key path in the tree of parameters, boxes included."""

    shape: tuple[int, ...] = dataclasses.field(compare=False)
    dtype: np.dtype = dataclasses.field(compare=False)
    spec: PartitionSpec | None = dataclasses.field(compare=False, default=None)
    """Sharding on a mesh with explicit axes."""

    is_weakly_typed: bool = dataclasses.field(compare=False, default=False)
    """Whether its dtype is weak, as that of a Python number."""

    def __str__(self) -> str:
        return "/".join(self.path)

    @property
    def is_of_adapter(self) -> bool:
        """Whether it belongs to an adapter that rules added to a Linen model."""
        return _is_of_adapter(self.path)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, order=True)
class Buffer:
    """A leaf of a model's variables other than parameters."""

    number: int
    """Index among the leaves; buffers compare and hash by it alone."""

    key_path: tuple[Any, ...] = dataclasses.field(compare=False, repr=False)
    """JAX's key path in the tree of these variables."""


class ParameterAxis(NamedTuple):
    """An axis of a parameter or buffer."""

    parameter: Parameter | Buffer
    axis: int


def parameters_of(
    params: Any, is_box: Callable[[Any], bool] | None = None
) -> tuple[Parameter, ...]:
    """Returns the leaves of the parameters.

    Args:
        params: pytree of arrays, their shapes, or numbers.
        is_box: predicate for nodes that box parameters with metadata.

    Raises:
        TypeError: if a leaf is neither.
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
    names = [tuple(map(_name, path)) for path, _, _ in paths]
    order = sorted(range(len(paths)), key=lambda i: _is_of_adapter(names[i]))
    numbers = {i: number for number, i in enumerate(order)}
    return tuple(
        Parameter(
            number=numbers[i],
            path=names[i] or ("params",),
            key_path=key_path,
            shape=np.shape(leaf),
            dtype=jax.dtypes.result_type(leaf),
            spec=explicit_spec(leaf),
            is_weakly_typed=not is_array(leaf) or getattr(leaf, "weak_type", False),
        )
        for i, (_, key_path, leaf) in enumerate(paths)
    )


def _is_of_adapter(path: tuple[str, ...]) -> bool:
    *_, entry, field, _ = "", "", "", *path
    return entry.startswith("aqt_") and field == ADAPTER


def _name(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)


def buffers_of(others: Any) -> dict[Buffer, Any]:
    """Returns the leaves of variables other than parameters, with their values."""
    found = jax.tree.leaves_with_path(others, is_leaf=_is_none)
    return {Buffer(i, key_path): leaf for i, (key_path, leaf) in enumerate(found)}


Leaf = TypeVar("Leaf", Parameter, Buffer)


def by_input(inputs: Any, leaves: Iterable[Leaf]) -> dict[int, Leaf]:
    """Returns the leaves of variables keyed by input index.

    Args:
        inputs: tree of the variables' input indices, as in `jaxpr.tracing.Traced`.
        leaves: result of `parameters_of` or `buffers_of` for the variables.
    """
    numbers = jax.tree.leaves(inputs, is_leaf=_is_none)
    pairs = zip(numbers, leaves, strict=True)
    return {i: leaf for i, leaf in pairs if i is not None}


def _is_none(x: Any) -> bool:
    return x is None


class Place(NamedTuple):
    """An input of an equation of a jaxpr."""

    equation: Location
    number: int
    """Index among the inputs of the equation."""


@dataclasses.dataclass(frozen=True)
class FoundOperand:
    """An operand that its contraction quantizes, in the trace of one call."""

    key: OperandKey
    operand: Operand
    cfg: config.DotGeneral
    batch_axes: Axes
    frozen_operands: str
    """The contraction's choice of operands to freeze, as `Contraction` has it."""

    name: str | None
    """Name for its frozen weights, instead of the names of their parameters."""

    obstacle: str | None
    """Reason why no weight can be frozen here, if any."""

    place: Place = Place((), 0)
    identity: str | None = None
    """Digest of its computation, if it depends only on parameters and constants."""

    parameters: frozenset[Parameter] = frozenset()
    """Parameters that it depends on."""

    depends_on_buffers: bool = False
    """Whether it depends on variables other than parameters."""

    depends_on_inputs: bool = False

    is_product: bool = False
    """Whether its contraction stays in float, because each sum has one product."""

    is_matrix: bool = False
    """Whether a `lax.dot_general` without batch axes contracts it, and nothing looks up
    its rows."""

    state: tuple[str, ...] = ()
    """As `FrozenRecord.state`."""

    num_states: int = 1
    """Number of states that quantize it: in scans whose steps share it, one for each
    step."""

    moments: tuple[tuple[str, ...], ...] = ()
    """Paths of the second moments by whose sum it is rounded at conversion."""

    @property
    def weight(self) -> tuple[Any, ...]:
        """What serving finds its weight by, if a rule quantizes it."""
        return self.key.path, self.operand, self.cfg, self.identity, self.state

    @classmethod
    def of(
        cls,
        contraction: Contraction,
        key: OperandKey,
        obstacle: str | None,
    ) -> "FoundOperand":
        """Returns an operand of a contraction, before its origin is known."""
        operation = contraction.operation
        batch_axes = operation.axes(key.side).batch
        return cls(
            key=key,
            operand=contraction.operand(key.side),
            cfg=contraction.cfg,
            batch_axes=batch_axes,
            frozen_operands=contraction.frozen_operands,
            name=contraction.name,
            obstacle=obstacle,
            is_product=contraction.is_product,
            is_matrix=isinstance(operation, DotGeneral) and not batch_axes,
        )

    def made_of(
        self,
        origin: Origin,
        place: Place,
        parameters: Mapping[int, Parameter],
        buffers: Collection[int],
    ) -> "FoundOperand":
        """Returns the operand with its place and origin in a jaxpr.

        Args:
            origin: origin of the operand.
            place: place of the operand, or of the equation that names it.
            parameters: inputs of the jaxpr that are parameters, by index.
            buffers: indices of inputs that are other variables of the model.
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
        """Whether `frozen_operands` names it explicitly."""
        return self.frozen_operands in (self.key.side, "both")

    def __str__(self) -> str:
        return f"{self.operand} of {errors.label('/'.join(self.key.path))}"


@dataclasses.dataclass(frozen=True)
class Discovery:
    """The quantized operands in the trace of one call."""

    jaxpr: core.ClosedJaxpr
    parameters: Mapping[int, Parameter]
    """Inputs that are parameters, by index."""

    operands: tuple[FoundOperand, ...]
    num_contractions: int
    """Number of contractions, including those in float."""

    learned: frozenset[Parameter]
    """Parameters of learned calibrations."""

    unsummed: Mapping[Parameter, str]
    """Why contractions of parameters by rules stay in float, where nothing is summed.
    """

    def read_parameters(
        self, frozen: Collection[OperandKey] = ()
    ) -> frozenset[Parameter]:
        """Returns the parameters that the call reads if some operands are frozen."""
        unread: dict[Location, set[int]] = {}
        for one in self.operands:
            if one.key in frozen:
                unread.setdefault(one.place.equation, set()).add(one.place.number)
        read = analysis.read_inputs(self.jaxpr, self.parameters.keys(), unread)
        return frozenset(self.parameters[i] for i in read)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["key"]
)
@dataclasses.dataclass(frozen=True)
class StoredOperand:
    """Arrays stored for an operand; they become outputs of a trace."""

    key: OperandKey
    arrays: Any


@dataclasses.dataclass(frozen=True)
class CallTrace:
    """The trace of one call of a model."""

    jaxpr: core.ClosedJaxpr
    inputs: Mapping[int, Parameter | Buffer]
    """Inputs that are variables of the model, by index."""

    stored: tuple[StoredOperand, ...]
    """Stored operands, with the index of a jaxpr output in place of every array."""

    @functools.cached_property
    def axes_of_integers(self) -> list[Sequence[ParameterAxis | None]]:
        """For each stored weight, the parameter axes that the axes of its integers come
        from; None for an axis that comes from none."""
        integers = [one.arrays.qtensor.qvalue for one in self.stored]
        part = slicing.slice_outputs(self.jaxpr, integers)
        read = [self.inputs[i] for i in part.inputs]
        return [
            tuple(axis and ParameterAxis(read[axis.input], axis.axis) for axis in one)
            for one in axes.output_axes(part.jaxpr)
        ]
