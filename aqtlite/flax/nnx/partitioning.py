"""Sharding metadata of frozen weights, carried over from their parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from aqtlite.program.serving.model import Parameter, ParameterAxis
from aqtlite.program.serving.weight import Weight
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.shapes.sharding import names_of_blocks

_NAMES = "out_sharding"
"""Metadata key of a variable for the mesh axes, or logical axes, of its axes."""

_BESIDE = ("sharding_rules", "mesh")
"""Metadata keys that define the meaning of the axis names."""


def metadata_of(
    weight: Weight, variables: Mapping[tuple[str, ...], nnx.Variable[Any]]
) -> dict[str, Any]:
    """Returns the sharding metadata of a frozen weight; empty if it has none.

    Args:
        weight: the weight.
        variables: the parameters, by path.
    """
    if not any(map(_declared, variables.values())):
        return {}
    return metadata_of_names(*names_of_axes(weight.axes(), variables))


def has_names(model: nnx.Module) -> bool:
    """Whether a variable of a model names its axes."""
    leaves = jax.tree.leaves(
        nnx.state(model), is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    return any(_declared(one) for one in leaves if isinstance(one, nnx.Variable))


def names_of_axes(
    axes: Sequence[ParameterAxis | None],
    variables: Mapping[tuple[str, ...], nnx.Variable[Any]],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the names of axes of parameters, and metadata that gives them a meaning.

    Args:
        axes: the axes; None has no name.
        variables: the parameters, by path.
    """
    names: list[Any] = []
    beside: dict[str, Any] = {}
    for axis in axes:
        name = None
        if axis is not None and isinstance(axis.parameter, Parameter):
            variable = variables[axis.parameter.path]
            declared = _declared(variable)
            name = declared[axis.axis] if axis.axis < len(declared) else None
            beside = beside if name is None else _beside(variable)
        names.append(name)
    return tuple(names), beside


def metadata_of_names(names: tuple[Any, ...], beside: Mapping[str, Any]) -> Any:
    """Returns the metadata of a variable whose axes have names; empty without any."""
    if not any(names):
        return {}
    # Computed from placed parameters, or placed by load_serving: no eager sharding.
    return {_NAMES: names, "eager_sharding": False, **beside}


def names_of_weight(
    variable: nnx.Variable[Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As `names_of_axes`, of a frozen weight in the order of its own axes."""
    names, q = _declared(variable), variable.get_raw_value()
    found = tuple(names[axis] for axis in q.stored_axes) if names else ()
    return found, _beside(variable)


def _beside(variable: nnx.Variable[Any]) -> dict[str, Any]:
    """Returns what defines the meaning of a variable's names."""
    metadata = variable.get_metadata()
    return {key: metadata[key] for key in _BESIDE if metadata.get(key) is not None}


def _declared(variable: nnx.Variable[Any]) -> tuple[Any, ...]:
    """Returns the declared names of a parameter's axes."""
    declared = variable.get_metadata().get(_NAMES) or ()
    declared = getattr(declared, "spec", declared)
    return tuple(declared) if isinstance(declared, tuple | PartitionSpec) else ()


def without_names(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metadata of a frozen parameter, which has no axes to name."""
    return {key: value for key, value in metadata.items() if key != _NAMES}


def specs_of(qtensor: QTensor, spec: PartitionSpec) -> QTensor:
    """Returns the partition spec of each array of a frozen weight.

    Of scales and the like, by `names_of_blocks`.

    Args:
        qtensor: the weight.
        spec: partition spec of its integers.
    """
    names = (*spec, *(None,) * (len(qtensor.qvalue.shape) - len(spec)))

    def of_array(x: Any) -> PartitionSpec:
        return PartitionSpec(*names_of_blocks(names, qtensor.qvalue.shape, x))

    return jax.tree.map(of_array, qtensor)


def sharded(qtensor: QTensor, sharding: Any) -> QTensor:
    """Returns the shapes of a frozen weight with shardings.

    Args:
        qtensor: the weight, arrays or shapes.
        sharding: sharding of the integers.
    """
    if not isinstance(sharding, NamedSharding):
        return qtensor
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(sharding.mesh, spec)
        ),
        qtensor,
        specs_of(qtensor, sharding.spec),
    )
