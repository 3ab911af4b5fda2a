"""Checks and reads the variables passed to a call of a Linen model."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import errors
from flax import linen as nn
from flax.core import unfreeze

from aqtlite.jaxpr import tracing
from aqtlite.program.serving.model import Parameter, parameters_of
from aqtlite.quantization.states.state_collections import (
    OF_GRADIENTS,
    PARAMETERS,
    STATISTICS,
)
from aqtlite.quantization.states.stored_statistics import restored_statistics

_STATISTICS = STATISTICS, OF_GRADIENTS


def unfrozen(variables: Any) -> dict[str, Any]:
    """Returns variables as plain dictionaries, with statistics as dataclasses.

    Raises:
        TypeError: if they are not a mapping.
    """
    if not isinstance(variables, Mapping):
        raise TypeError(
            "the variables of a Linen model are a mapping of collections, such as "
            "{'params': ...}, and come before its arguments; got "
            f"{type(variables).__name__}"
        )
    return {
        name: restored_statistics(value) if name in _STATISTICS else unfreeze(value)
        for name, value in variables.items()
    }


def parameters_in(
    traced: tracing.Traced, variables: Mapping[str, Any]
) -> dict[int, Parameter]:
    """Returns the inputs of a call that are parameters, by index.

    Args:
        traced: the call, with the variables as first argument.
        variables: the variables.
    """
    flat = jax.tree.leaves_with_path(variables)
    places = [i for i, (path, _) in enumerate(flat) if path[0].key == PARAMETERS]
    ones = parameters_of(variables.get(PARAMETERS, {}), nn.meta.is_axis_metadata)
    by_leaf = dict(zip(places, ones, strict=True))
    return {i: by_leaf[leaf] for i, leaf in enumerate(traced.leaves) if leaf in by_leaf}


@contextlib.contextmanager
def checked(variables: Mapping[str, Any]) -> Iterator[None]:
    """Turns Flax's errors about a missing collection "params" into a clear one.

    Flax's own error names the parameter that it looked up, in an empty collection.

    Args:
        variables: variables of the call traced inside the context.

    Raises:
        ValueError: if the call reads parameters, and there is no such collection.
    """
    refusals = (
        errors.ApplyScopeInvalidVariablesTypeError,
        errors.ScopeCollectionNotFound,
    )
    try:
        yield
    except refusals as error:
        if PARAMETERS in variables:
            raise
        names = ", ".join(map(repr, variables)) or "nothing"
        raise ValueError(
            f"the variables have no collection 'params', but {names}: if these are the "
            "parameters, give {'params': parameters}"
        ) from error
