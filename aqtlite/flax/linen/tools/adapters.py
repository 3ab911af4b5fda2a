"""The parameters of adapters among the variables of Linen models."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn

from aqtlite import errors
from aqtlite.flax.linen import given_variables
from aqtlite.flax.linen.quantize_model import QuantizedModel
from aqtlite.flax.linen.state_entries import merged
from aqtlite.program.serving.placeholder import is_placeholder
from aqtlite.quantization.states.state_collections import ADAPTER, PARAMETERS


def adapters_of(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of adapters alone: what is trained.

    Args:
        variables: variables of a model with adapters (`aqtlite.Rule.adapter`).

    Returns:
        Nested dictionaries, those of the collection "params" with adapters in them.

    Raises:
        ValueError: if there are none.
    """
    params = given_variables.unfrozen(variables).get(PARAMETERS, {})
    found: dict[str, Any] = _adapters_in(params)
    if not found:
        raise ValueError(
            'the collection "params" has no adapters: make some with '
            "model.init_adapters(variables, *args) of a model whose rules have adapters"
        )
    return found


def with_adapters(
    variables: Mapping[str, Any], adapters: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns variables with adapters added, or replaced.

    >>> import flax.linen as nn
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from aqtlite import Rule, config
    >>> from aqtlite.flax import quantize_model
    >>> rule = Rule(cfg=config.weight_only(4), adapter=config.Lora(rank=2, alpha=4))
    >>> model, x = quantize_model(nn.Dense(4), [rule]), jnp.ones((1, 8))
    >>> variables = model.model.init(jax.random.key(0), x)
    >>> adapters = model.init_adapters(variables, x)
    >>> model.apply(with_adapters(variables, adapters), x).shape
    (1, 4)

    Args:
        variables: variables of the model, float or converted.
        adapters: as `adapters_of` or `QuantizedModel.init_adapters` return them.

    Raises:
        TypeError: if these are no mapping.
    """
    if not isinstance(adapters, Mapping):
        raise TypeError(
            "adapters must be a mapping, as adapters_of or model.init_adapters return "
            f"them, got {errors.brief(adapters)}"
        )
    variables = given_variables.unfrozen(variables)
    params = merged(variables.get(PARAMETERS, {}), adapters)
    return {**variables, PARAMETERS: params}


def with_initial_adapters(
    model: QuantizedModel, variables: Mapping[str, Any], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Returns variables with initial adapters, and with kernels that keep the rest.

    For adapters that take what they start from out of the kernels (``init="pissa"`` of
    a `config.Lora`); others start as by `QuantizedModel.init_adapters`. Convert the
    result afterwards, which quantizes the rest.

    >>> import flax.linen as nn
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from aqtlite import Rule, config
    >>> from aqtlite.flax import quantize_model
    >>> lora = config.Lora(rank=2, alpha=4, init="pissa")
    >>> model = quantize_model(nn.Dense(4), [Rule(cfg=None, adapter=lora)])
    >>> x = jnp.eye(8)
    >>> variables = model.model.init(jax.random.key(0), x)
    >>> started = with_initial_adapters(model, variables, x)
    >>> error = model.apply(started, x) - model.model.apply(variables, x)
    >>> bool(abs(error).max() < 1e-5)
    True

    Args:
        model: result of `quantize_model`, by rules with adapters.
        variables: its float variables.
        *args: arguments of `apply`, or their shapes.
        **kwargs: as `args`.

    Raises:
        ValueError: if a kernel is frozen that an adapter starts from, or if a weight
            that changes is more than moved parameters.
    """
    adapters, changed = model.traced(variables, args, kwargs).started()
    variables = given_variables.unfrozen(variables)
    params = with_values(variables[PARAMETERS], changed)
    return with_adapters({**variables, PARAMETERS: params}, adapters)


def with_values(params: Any, changed: Mapping[tuple[str, ...], Any]) -> Any:
    """Returns parameters with some replaced, in their boxes.

    Args:
        params: the parameters.
        changed: new ones, by path.
    """

    def replaced(path: Any, node: Any) -> Any:
        value = changed.get(tuple(str(key.key) for key in path))
        return node if value is None else nn.meta.replace_boxed(node, value)

    return jax.tree.map_with_path(
        replaced,
        params,
        is_leaf=lambda x: nn.meta.is_axis_metadata(x) or is_placeholder(x),
    )


def without_adapters(params: Any) -> Any:
    """Returns parameters without those of adapters."""
    if not isinstance(params, Mapping):
        return params
    kept = {}
    for name, child in params.items():
        if name.startswith("aqt_") and isinstance(child, Mapping):
            child = {field: x for field, x in child.items() if field != ADAPTER}
            if not child:
                continue
        kept[name] = without_adapters(child)
    return kept


def _adapters_in(node: Any) -> dict[str, Any]:
    found = {}
    for name, child in node.items():
        if not isinstance(child, Mapping):
            continue
        if name.startswith("aqt_") and ADAPTER in child:
            found[name] = {ADAPTER: child[ADAPTER]}
        elif inner := _adapters_in(child):
            found[name] = inner
    return found
