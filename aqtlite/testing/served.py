"""The served model computes what the trained one does."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from aqtlite.flax import convert
from aqtlite.program.serving.frozen_record import COLLECTION, frozen_entries
from aqtlite.testing import differences

_ADVICE = (
    "Contractions of integers give the same in both programs, but float code around "
    "them is compiled anew in each and may be fused otherwise: docs/serving.md says "
    "what is promised. To find the operation, compare the outputs of parts of the model"
)


_ROUNDED = (
    "The rounding of {names} is chosen at conversion (fwd.rhs.rounding), so that they "
    "are not the integers of training. Compare the model with fwd.rhs.rounding=None, "
    "and what is served with the float model, within a tolerance"
)


def assert_served_equals_trained(
    model: nn.Module,
    variables: Mapping[str, Any],
    *args: Any,
    serving: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> None:
    """Asserts that a converted model equals the trained one bit for bit.

    Runs ``model.apply`` under `jax.jit`, once with the float variables and once with
    the serving variables, and compares all outputs. NaN equals NaN; ``0.0`` and
    ``-0.0`` differ.

    Args:
        model: Linen module that contains `AqtDotGeneral` or `AqtEinsum`.
        variables: trained variables of the model.
        *args: positional arguments of ``model.apply`` after `variables`.
        serving: serving variables from `convert` or `load_serving`. For a model with
            several methods or calls, convert once and compare each. None converts
            `variables` for this call.
        **kwargs: keyword arguments of ``model.apply``, `method`, `rngs` and `mutable`
            included; any others that are not arrays are constants. With `mutable`, the
            returned collections are compared too, except for the frozen weights.

    Raises:
        AssertionError: if the results differ; the message names the first leaf that
            differs, the number of differing elements and the size of the difference.
            Those of weights that are rounded at conversion (`config.Gptq`) do.
        ValueError: if no weight is frozen, as in a model without quantized
            contractions: the comparison could not fail.

    >>> from aqtlite import config
    >>> from aqtlite.flax import AqtDotGeneral
    >>> model = nn.Dense(4, dot_general=AqtDotGeneral(config.fully_quantized()))
    >>> x = jnp.linspace(-1, 1, 6).reshape(2, 3)
    >>> variables = model.init(jax.random.key(0), x)
    >>> assert_served_equals_trained(model, variables, x)

    With existing serving variables:

    >>> serving = convert(model, variables, x)
    >>> assert_served_equals_trained(model, variables, 2 * x, serving=serving)
    >>> other = jax.tree.map(lambda v: 2 * v, variables)
    >>> assert_served_equals_trained(model, other, x, serving=serving)
    Traceback (most recent call last):
    ...
    AssertionError: the served Dense differs from the trained one in its output, \
float32 of shape (2, 4): 8 of 8 elements ...
    """
    if serving is None:
        serving = convert(model, variables, *args, **kwargs)
    if not jax.tree.leaves(serving.get(COLLECTION, {})):
        raise ValueError(
            f"the serving variables hold no frozen weights (collection '{COLLECTION}' "
            "is missing or empty), so that there is nothing to compare: pass what "
            "convert or load_serving returned. convert(..., report=print) says why a "
            "weight stays in float"
        )
    trained, served = (_run(model, one, args, kwargs) for one in (variables, serving))
    _assert_equal(type(model).__name__, trained, served, _advice(serving))


def _advice(serving: Mapping[str, Any]) -> str:
    """Returns what to do about results that differ."""
    rounded = [
        "/".join((*one.module, one.name))
        for one in frozen_entries(serving[COLLECTION])
        if one.record.cfg.fwd.rhs.rounding is not None
    ]
    if not rounded:
        return _ADVICE
    more = f" and {len(rounded) - 1} other weights" if rounded[1:] else ""
    return _ROUNDED.format(names=f"{rounded[0]}{more}")


def _run(
    model: nn.Module,
    variables: Mapping[str, Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Runs ``model.apply`` under jit, with all non-array arguments as constants."""
    leaves, treedef = jax.tree.flatten((args, dict(kwargs)))
    traced = {
        i: x for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray)
    }

    @jax.jit
    def apply(variables: Any, arrays: dict[int, Any]) -> Any:
        filled = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
        call_args, call_kwargs = jax.tree.unflatten(treedef, filled)
        out = model.apply(variables, *call_args, **call_kwargs)
        if not call_kwargs.get("mutable"):
            return out
        out, updated = out
        return out, {k: v for k, v in updated.items() if k != COLLECTION}

    return apply(variables, traced)


def _assert_equal(name: str, trained: Any, served: Any, advice: str) -> None:
    trained_tree, served_tree = (str(jax.tree.structure(x)) for x in (trained, served))
    if trained_tree != served_tree:
        raise AssertionError(
            f"the trained {name} returns {trained_tree}, the served one {served_tree}"
        )
    pairs = zip(
        jax.tree.leaves_with_path(trained),
        jax.tree.leaves(served),
        strict=True,
    )
    for (path, one), other in pairs:
        difference = _difference(jnp.asarray(one), jnp.asarray(other))
        if difference is not None:
            where = f"output{jax.tree_util.keystr(path)}"
            raise AssertionError(
                f"the served {name} differs from the trained one in its {where}, "
                f"{difference}. {advice}"
            )


def _difference(trained: jax.Array, served: jax.Array) -> str | None:
    """Describes the difference; None if there is none."""
    kinds = [f"{x.dtype} of shape {x.shape}" for x in (trained, served)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]}: it is served as {kinds[1]}"
    first, second = (differences.data(x) for x in (trained, served))
    differs = differences.differing(first, second)
    if not differs.any():
        return None
    text = differences.describe(first, second, differs, "trained", "served")
    return f"{kinds[0]}: {differs.sum()} of {differs.size} elements {text}"
