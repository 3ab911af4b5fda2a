"""Sharding metadata of frozen weights, carried over from their parameters."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from aqtlite.program.serving.model import Parameter, StoredWeight
from aqtlite.qtensor.qtensor import QTensor

_NAMES = "out_sharding"
"""Metadata key of a variable for the mesh axes, or logical axes, of its axes."""

_BESIDE = ("sharding_rules", "mesh")
"""Metadata keys that define the meaning of the axis names."""


def metadata_of(
    stored: StoredWeight, variables: Mapping[tuple[str, ...], nnx.Variable[Any]]
) -> dict[str, Any]:
    """Returns the sharding metadata of a frozen weight; empty if it has none.

    Args:
        stored: the weight.
        variables: the parameters, by path.
    """
    if not any(map(_declared, variables.values())):
        return {}
    source, names = None, []
    for axis in stored.axes():
        name = None
        if axis is not None and isinstance(axis.parameter, Parameter):
            variable = variables[axis.parameter.path]
            declared = _declared(variable)
            name = declared[axis.axis] if axis.axis < len(declared) else None
            source = source if name is None else variable
        names.append(name)
    if source is None:
        return {}
    metadata = source.get_metadata()
    beside = {key: metadata[key] for key in _BESIDE if metadata.get(key) is not None}
    # Computed from placed parameters, or placed by load_serving: no eager sharding.
    return {_NAMES: tuple(names), "eager_sharding": False, **beside}


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

    Axes of the scale along which elements share it are not partitioned.

    Args:
        qtensor: the weight.
        spec: partition spec of its integers.
    """
    names = (*spec, *(None,) * (len(qtensor.qvalue.shape) - len(spec)))

    def of_array(x: Any) -> PartitionSpec:
        sizes = zip(names, qtensor.qvalue.shape, x.shape, strict=True)
        return PartitionSpec(*(name if a == b else None for name, a, b in sizes))

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
