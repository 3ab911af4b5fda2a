"""Matching the arrays of a checkpoint with the variables of a Flax model."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from flax import errors
from flax import linen as nn

from aqtlite.checkpoint.arrays import ArrayInfo
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import Reader
from aqtlite.checkpoint.names import path_name
from aqtlite.checkpoint.nodes import info_of
from aqtlite.flax.linen.quantize_model import Model
from aqtlite.jaxpr import tracing
from aqtlite.program.serving.frozen_record import COLLECTION
from aqtlite.quantization.stored_statistics import is_obsolete

PARAMS = "params"
OF_MODELS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    NotImplementedError,
    errors.FlaxError,
)
"""Errors that a model may raise when it is traced."""


def abstract_variables(
    model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Traces a model's `init` for the shapes of its float variables.

    Raises:
        CheckpointError: if the model raises.
    """

    def init(call_args: tuple[Any, ...], call_kwargs: dict[str, Any]) -> Any:
        # These are arguments of `apply` alone.
        init_kwargs = {
            k: v for k, v in call_kwargs.items() if k not in ("mutable", "rngs")
        }
        return model.init(jax.random.key(0), *call_args, **init_kwargs)

    flat, inputs = tracing.close_over_constants(
        init, (args, dict(kwargs)), tracing.is_array
    )
    try:
        shapes = jax.eval_shape(flat, inputs)
    except OF_MODELS as error:
        raise untraceable(type(model).__name__, args, kwargs, error) from error
    return {name: value for name, value in shapes.items() if name != COLLECTION}


def untraceable(
    model: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception
) -> CheckpointError:
    """The error that a model raises with the sample inputs."""
    called_with = jax.tree.map(_brief, (*args, *kwargs.values()))
    return CheckpointError(
        f"tracing {model} with the sample inputs {', '.join(map(str, called_with))} "
        "failed; are they of the right shapes and dtypes? "
        f"{type(error).__name__}: {' '.join(str(error).split())}"
    )


def _brief(x: Any) -> Any:
    return str(info_of(x)) if tracing.is_array(x) else x


def match(
    source: Reader,
    model: Model,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Finds a model's variables in a source.

    Args:
        source: all variables, or the collection "params" alone.
        model: the model.
        args: sample inputs of the model; shapes will do.
        kwargs: sample inputs by name; shapes will do.

    Returns:
        The shapes of the variables, and for the name of each the name in the source.

    Raises:
        CheckpointError: if the source lacks an array, or holds something else.
    """
    template = abstract_variables(model, args, kwargs)
    arrays = source.arrays
    if any(name.startswith(f"{COLLECTION}/") for name in arrays):
        raise CheckpointError(
            f"the source holds frozen weights already (collection '{COLLECTION}'); "
            "convert the float checkpoint of training"
        )
    has_collections = any(name.startswith(f"{PARAMS}/") for name in arrays)
    # A collection that the source lacks is one that serving makes, such as "cache".
    found = {
        name: value
        for name, value in template.items()
        if name == PARAMS or any(array.startswith(f"{name}/") for array in arrays)
    }
    without_boxes = _names_without_boxes(found)
    origin: dict[str, str] = {}
    wrong: list[str] = []

    def look_up(key_path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        name = path_name(key_path)
        boxed, unboxed = (
            n if has_collections else n.removeprefix(f"{PARAMS}/")
            for n in (name, without_boxes[name])
        )
        found_as = boxed if boxed in arrays else unboxed
        origin[name] = found_as
        wrong.extend(differences(source, found_as, info_of(leaf)))
        dtype = arrays[found_as].dtype if found_as in arrays else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    variables = jax.tree_util.tree_map_with_path(look_up, found)
    wrong += unknown(source, origin.values())
    refuse(wrong, lambda: _advice(template, arrays))
    return variables, origin


def differences(source: Reader, name: str, wanted: ArrayInfo) -> list[str]:
    """Says how a leaf of a source differs from a variable; empty if it is equal."""
    if name in source.others:
        return [f"{name} is {source.others[name]}, the model's an array"]
    if name not in source.arrays:
        return [f"{name} is missing"]
    found = source.arrays[name]
    is_equal = found.shape == wanted.shape
    return [] if is_equal else [f"{name} is {found}, the model's is {wanted}"]


def unknown(source: Reader, names: Iterable[str]) -> list[str]:
    """Says what a source holds beside these names."""
    known = set(names)
    wrong = [
        f"{name} is not in the model"
        for name in source.arrays
        if name not in known and not is_obsolete(name, source.arrays)
    ]
    wrong += [
        f"{name} is {description}, and not in the model"
        for name, description in source.others.items()
        if name not in known
    ]
    return wrong


def refuse(wrong: list[str], advice: Callable[[], str]) -> None:
    """Refuses a source that is not of a model.

    Args:
        wrong: differences from the model.
        advice: function that says what to do.

    Raises:
        CheckpointError: if there is something wrong.
    """
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(
            f"the source does not hold the variables of this model: "
            f"{'; '.join(wrong[:5])}{more}{advice()}"
        )


def subtrees_of(wanted: list[str], names: set[str]) -> list[str]:
    """The paths below which a source has all the names that a model wants."""
    if not wanted:
        return []
    first = f"/{wanted[0]}"
    return sorted(
        (
            path
            for path in (n.removesuffix(first) for n in names if n.endswith(first))
            if all(f"{path}/{name}" in names for name in wanted)
        ),
        key=lambda path: (path.split("/")[-1] != PARAMS, path),
    )


def advice_of(options: list[str]) -> str:
    """Advises to select one of some subtrees; empty for none."""
    if not options:
        return ""
    return (
        ". Its parameters are in a subtree, which --subtree (subtree=) names: "
        f"{' or '.join(options)}"
    )


def _advice(template: Mapping[str, Any], arrays: Iterable[str]) -> str:
    """Names the subtrees of a source that hold the model's parameters."""
    params = _names_without_boxes({PARAMS: template[PARAMS]}).values()
    wanted = [name.removeprefix(f"{PARAMS}/") for name in params]
    names = set(arrays)
    found = subtrees_of(wanted, names)[:4]
    return advice_of([" ".join(_options(path, template, names)) for path in found])


def _options(path: str, template: Mapping[str, Any], names: set[str]) -> list[str]:
    """The options that select parameters, and the collections beside them."""
    above, slash, last = path.rpartition("/")
    collections = [
        f"{above}{slash}{collection}"
        for collection in template
        if collection != PARAMS
        and last == PARAMS
        and any(name.startswith(f"{above}{slash}{collection}/") for name in names)
    ]
    return [f"--subtree {one}" for one in (path, *collections)]


def _names_without_boxes(variables: Any) -> dict[str, str]:
    """Maps the name of each leaf to its name without the box around it."""
    names: dict[str, str] = {}
    for path, node in jax.tree_util.tree_flatten_with_path(
        variables, is_leaf=nn.meta.is_axis_metadata
    )[0]:
        below = [sub for sub, _ in jax.tree_util.tree_flatten_with_path(node)[0]]
        for sub in below:
            outside = path if len(below) == 1 else (*path, *sub)
            names[path_name((*path, *sub))] = path_name(outside)
    return names
