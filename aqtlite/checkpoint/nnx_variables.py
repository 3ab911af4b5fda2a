"""The variables of NNX models, by name, and those that a checkpoint has for them."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from flax import nnx, traverse_util
from jax.sharding import PartitionSpec

from aqtlite.checkpoint import keys
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import Reader
from aqtlite.checkpoint.names import name_of, path_name, steps_of
from aqtlite.checkpoint.nodes import info_of
from aqtlite.checkpoint.variables import (
    advice_of,
    differences,
    refuse,
    subtrees_of,
    unknown,
)
from aqtlite.flax.linen.frozen_kernel import FrozenKernel
from aqtlite.flax.nnx.model import ATTRIBUTE, QuantizedModel
from aqtlite.flax.nnx.variables import Sample, is_weight
from aqtlite.program.freezing import FrozenParameter
from aqtlite.program.serving.frozen_record import COLLECTION, IDENTITY, RECORD

MODEL = "model"
"""First step of the names of variables of the model itself. The collections of
quantization are beside it: "aqt", "statistics"."""

_FROZEN = "frozen"
_MADE_BY_SERVING = (nnx.RngState, nnx.Cache)
"""The variables that a float checkpoint may lack."""


def with_leaves(
    model: QuantizedModel, function: Callable[[str, Any, Any], Any]
) -> QuantizedModel:
    """Returns a copy of a model with other values in its variables.

    Args:
        model: the model.
        function: takes the name of a leaf, the value, and the variable that has it.
    """
    graphdef, state = nnx.split(model, graph=True)
    flat = []
    for path, variable in nnx.to_flat_state(state):
        value = _value(variable)
        if not isinstance(value, FrozenParameter):
            above = name_of(_steps(path, variable))
            value = jax.tree_util.tree_map_with_path(
                lambda below, x, above=above, variable=variable: function(
                    "/".join(filter(None, (above, path_name(below)))), x, variable
                ),
                value,
            )
        is_variable = isinstance(variable, nnx.Variable)
        flat.append((path, variable.replace(value) if is_variable else value))
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def tree_of(model: QuantizedModel, without: Collection[str]) -> dict[str, Any]:
    """Returns the variables of a serving model as a checkpoint has them.

    Integers and scales are in "aqt", by the path of the module and the name of the
    parameter, and everything else is where the model has it.

    Args:
        model: model with shapes in its variables.
        without: the names of variables that the checkpoint has not.
    """
    nodes: dict[tuple[str, ...], Any] = {}
    for path, variable in nnx.to_flat_state(nnx.split(model, graph=True)[1]):
        steps, value = _steps(path, variable), _value(variable)
        if is_weight(variable):
            nodes[steps] = value
            nodes[(*steps[:-1], RECORD)] = variable.get_metadata(RECORD)
            continue
        if isinstance(value, FrozenParameter):
            kernel = FrozenKernel(value.shape, value.dtype, value.number, value.sliced)
            nodes[steps] = kernel
            continue
        for below, x in jax.tree_util.tree_flatten_with_path(value)[0]:
            name = "/".join(filter(None, (name_of(steps), path_name(below))))
            if name not in without:
                nodes[steps_of(name)] = as_stored(x)
    return traverse_util.unflatten_dict(nodes)


def keep_samples(model: QuantizedModel, names: Collection[str]) -> None:
    """Leaves samples of parameters out of a serving model that are not among names."""
    kept = {}
    for module, samples in model.aqt.samples.items():
        inside = module.split("/") if module else ()
        of_module = {
            name: sample
            for name, sample in samples.items()
            if name_of((COLLECTION, *inside, name, IDENTITY)) in names
        }
        if of_module:
            kept[module] = of_module
    model.aqt.samples = nnx.data(kept)


def _steps(path: tuple[Any, ...], variable: Any) -> tuple[str, ...]:
    """The steps of the name of a variable."""
    steps = tuple(map(str, path))
    if steps[0] != ATTRIBUTE:
        return (MODEL, *steps)
    is_sample = isinstance(variable, Sample)
    if not is_sample and not is_weight(variable):
        return steps[1:]
    *_, module, name = steps
    inside = module.split("/") if module else ()
    last = IDENTITY if is_sample else variable.get_metadata(RECORD).operand.side
    return (COLLECTION, *inside, name, last)


def _value(variable: Any) -> Any:
    is_variable = isinstance(variable, nnx.Variable)
    return variable.get_raw_value() if is_variable else variable


def as_stored(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a leaf in a checkpoint, which stores the data of keys."""
    if keys.is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def made_by_serving(model: QuantizedModel) -> set[str]:
    """The names of the variables that a checkpoint may lack: rngs and caches."""
    found: set[str] = set()

    def note(name: str, leaf: Any, variable: Any) -> Any:
        if isinstance(variable, _MADE_BY_SERVING):
            found.add(name)
        return leaf

    with_leaves(model, note)
    return found


def specs_of(model: QuantizedModel) -> dict[str, PartitionSpec]:
    """The partitioning of each array of a model with shapes in its variables."""
    found: dict[str, PartitionSpec] = {}
    for path, variable in nnx.to_flat_state(nnx.split(model, graph=True)[1]):
        value = _value(variable)
        if isinstance(value, FrozenParameter):
            continue
        specs = _value(nnx.get_partition_spec(variable))
        named = jax.tree_util.tree_flatten_with_path(value)[0]
        steps = _steps(path, variable)
        leaves = jax.tree.broadcast(specs, value)
        for (below, _), spec in zip(named, jax.tree.leaves(leaves), strict=True):
            name = "/".join(filter(None, (name_of(steps), path_name(below))))
            found[name] = spec
    return found


def as_shapes(model: QuantizedModel, dtypes: Mapping[str, Any]) -> QuantizedModel:
    """Returns a copy of a model with shapes in its variables.

    Args:
        model: the model.
        dtypes: new dtypes of variables, by name; the others stay.
    """

    def shape(name: str, leaf: Any, variable: Any) -> jax.ShapeDtypeStruct:
        del variable
        dtype = leaf.dtype if keys.is_key(leaf) else dtypes.get(name, leaf.dtype)
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    return with_leaves(model, shape)


def match(
    source: Reader, model: QuantizedModel
) -> tuple[QuantizedModel, dict[str, str]]:
    """Finds a model's variables in a source.

    Args:
        source: the variables of the model, by their paths or named as a conversion
            does; with the step "value" behind each, or without.
        model: the model.

    Returns:
        A copy of the model with shapes, of the dtypes of the source; and for the name
        of each variable the name in the source.

    Raises:
        CheckpointError: if the source lacks an array, or holds something else.
    """
    leaves: dict[str, Any] = {}
    with_leaves(model, lambda name, leaf, _: leaves.setdefault(name, leaf))
    arrays = source.arrays
    present = {*arrays, *source.others}
    places = _places(leaves, present)
    may_lack = made_by_serving(model)
    origin: dict[str, str] = {}
    wrong: list[str] = []
    for name, leaf in leaves.items():
        place = places[name]
        if place in present:
            origin[name] = place
        if place in present or name not in may_lack:
            wrong += differences(source, place, info_of(as_stored(leaf)))
    if any(_FROZEN in name.split("/")[:2] for name in unknown(source, origin.values())):
        raise CheckpointError(
            "the source holds frozen weights already ('frozen'); convert the float "
            "checkpoint of training"
        )
    wrong += unknown(source, origin.values())
    refuse(wrong, lambda: _advice(leaves, set(arrays)))
    dtypes = {name: arrays[place].dtype for name, place in origin.items()}
    return as_shapes(model, dtypes), origin


def _places(leaves: Collection[str], present: Collection[str]) -> dict[str, str]:
    """The names that a source has for variables, or should have."""
    return max(
        (dict(zip(leaves, named, strict=True)) for named in _spellings(leaves)),
        key=lambda places: sum(place in present for place in places.values()),
    )


def _spellings(leaves: Collection[str]) -> list[list[str]]:
    """The ways in which checkpoints name variables.

    They are named by their paths, or as those that a conversion writes; and of
    variables, as they are in an `nnx.State`, there is a step to the value.
    """
    ways = []
    for names in ([_path_of(name) for name in leaves], list(leaves)):
        ways += [names, [f"{name}/value" for name in names]]
    return ways


def _path_of(name: str) -> str:
    """The path in a model of a variable that training has."""
    first, _, below = name.partition("/")
    return below if first == MODEL else f"{ATTRIBUTE}/{name}"


def _advice(leaves: Collection[str], names: set[str]) -> str:
    """Names the subtrees of a source that hold the model's variables."""
    for wanted in _spellings(leaves):
        found = subtrees_of(wanted, names)[:4]
        if found:
            return advice_of([f"--subtree {path}" for path in found])
    return ""
