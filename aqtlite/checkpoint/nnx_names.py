"""The names of an NNX model's variables in checkpoints, and their values by name."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx

from aqtlite.checkpoint import arrays as arrays_lib
from aqtlite.checkpoint.names import name_of, path_name
from aqtlite.flax.nnx.model import ATTRIBUTE, QuantizedModel, Sample, is_weight
from aqtlite.program.serving.frozen_parameter import FrozenParameter
from aqtlite.program.serving.frozen_record import COLLECTION, IDENTITY, RECORD

MODEL = "model"
"""First step of the names of the model's own variables. The collections of
quantization, "aqt" and "statistics", are beside it."""


def variables(
    model: QuantizedModel,
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Yields the steps of each variable's name, the variable, and its value."""
    for path, variable in nnx.to_flat_state(nnx.split(model, graph=True)[1]):
        yield _steps(path, variable), variable, value_of(variable)


def named(steps: tuple[str, ...], value: Any) -> dict[str, Any]:
    """The leaves of a variable's value, by name."""
    return {
        "/".join(filter(None, (name_of(steps), path_name(below)))): x
        for below, x in jax.tree.leaves_with_path(value)
    }


def leaves_of(model: QuantizedModel) -> dict[str, Any]:
    """The leaves of all variables, by name."""
    return {
        name: leaf
        for steps, _, value in variables(model)
        if not isinstance(value, FrozenParameter)
        for name, leaf in named(steps, value).items()
    }


def with_leaves(
    model: QuantizedModel, function: Callable[[str, Any], Any]
) -> QuantizedModel:
    """Returns a copy of a model with a function mapped over its variables' leaves.

    Args:
        model: the model.
        function: takes the name of a leaf and its value; returns the new value.
    """
    graphdef, state = nnx.split(model, graph=True)
    flat = []
    for path, variable in nnx.to_flat_state(state):
        value = value_of(variable)
        pairs = named(_steps(path, variable), value).items()
        value = jax.tree.unflatten(
            jax.tree.structure(value), [function(name, x) for name, x in pairs]
        )
        is_variable = isinstance(variable, nnx.Variable)
        flat.append((path, variable.replace(value) if is_variable else value))
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def _steps(path: tuple[Any, ...], variable: Any) -> tuple[str, ...]:
    """The steps of a variable's name, from its path in the model."""
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


def value_of(variable: Any) -> Any:
    """Returns what a variable holds; anything else as it is."""
    is_variable = isinstance(variable, nnx.Variable)
    return variable.get_raw_value() if is_variable else variable


def as_stored(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a leaf in a checkpoint, which stores keys as their data."""
    if arrays_lib.is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def as_shapes(model: QuantizedModel, dtypes: Mapping[str, Any]) -> QuantizedModel:
    """Returns an abstract copy of a model.

    Args:
        model: the model.
        dtypes: new dtypes of variables, by name; the others keep theirs.
    """

    def shape(name: str, leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = leaf.dtype if arrays_lib.is_key(leaf) else dtypes.get(name, leaf.dtype)
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    return with_leaves(model, shape)
