"""Corrects the biases of converted models for the mean errors of their kernels."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import core as flax_core
from flax import linen as nn

from aqtlite.calibration import batches as batches_lib
from aqtlite.flax.linen import caller, given_variables
from aqtlite.flax.linen.quantize_model import Model, QuantizedModel, check_model
from aqtlite.program.biases import check_is_plain
from aqtlite.program.serving import statistics_uses
from aqtlite.program.serving.frozen_record import COLLECTION, RECORD, FrozenRecord
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization.state_collections import PARAMETERS

_ERRORS = "aqt_bias_errors"
"""Collection of the mean errors, within one call."""

Path = tuple[str, ...]


def correct_biases(
    model: Model,
    variables: Mapping[str, Any],
    serving: Mapping[str, Any],
    batches: Iterable[Any],
    **kwargs: Any,
) -> dict[str, Any]:
    """Adds the mean error of each layer's outputs to its bias (Nagel et al. 2019).

    A kernel W that is rounded to Q changes the mean of the outputs by ``E[x] (Q - W)``,
    which the bias can take back (arXiv:1906.04721, section 4.2). The inputs ``x`` are
    those of the float model. Layers are modules with a ``kernel`` that `convert` froze
    and a ``bias`` beside it, such as `nn.Dense`, `nn.DenseGeneral` and `nn.Conv`;
    others stay as they are.

    Args:
        model: Linen module with injected functions, or a `QuantizedModel`.
        variables: variables of training.
        serving: what `convert` made of them.
        batches: inputs, each a tuple of positional arguments or a single argument; all
            count alike.
        **kwargs: other arguments of `apply`, such as ``train=False``. They are
            constants of the compiled program.

    Returns:
        `serving` with other biases.

    Raises:
        TypeError: as for `calibrate`.
        ValueError: if there is no batch or no such layer; or for a layer with smoothing
            or rotation, in an `nn.scan` or `nn.vmap`, or that is not called.

    >>> from aqtlite import config
    >>> from aqtlite.flax import AqtDotGeneral, convert
    >>> model = nn.Dense(4, dot_general=AqtDotGeneral(config.weight_only(3)))
    >>> x = jnp.linspace(0, 1, 24).reshape(8, 3)
    >>> variables = model.init(jax.random.key(0), x)
    >>> serving = convert(model, variables, x)
    >>> serving = correct_biases(model, variables, serving, [x])
    >>> exact = x @ variables["params"]["kernel"]
    >>> bool(jnp.abs((model.apply(serving, x) - exact).mean(0)).max() < 1e-6)
    True
    """
    check_model(model, "correct_biases")
    variables = given_variables.unfrozen(variables)
    changed = {name: flax_core.unfreeze(value) for name, value in serving.items()}
    kernels = _frozen_kernels(changed)
    module = model.model if isinstance(model, QuantizedModel) else model

    @jax.jit
    def errors(variables: Any, kernels: Any, args: tuple[Any, ...]) -> Any:
        intercept = _intercepting(kernels)
        with nn.intercept_methods(intercept), caller.in_float():
            _, found = module.apply(variables, *args, mutable=[_ERRORS], **kwargs)
        return found.get(_ERRORS, {})

    total: dict[Path, jax.Array] = dict.fromkeys(kernels, jnp.float32(0))
    count = 0
    for batch in batches_lib.check(batches):
        args = batches_lib.args_of(batch)
        with batches_lib.called_with(batch), given_variables.checked(variables):
            found = errors(variables, kernels, args)
        for path in kernels:
            total[path] += _mean_of_calls(found, path)
        count += 1
    if not count:
        raise ValueError("correct_biases was given no batch")
    for path, error in total.items():
        layer = statistics_uses.at(changed[PARAMETERS], path)
        bias = nn.meta.unbox(layer["bias"])
        corrected = (bias + error / count).astype(bias.dtype)
        layer["bias"] = nn.meta.replace_boxed(layer["bias"], corrected)
    return changed


def _frozen_kernels(serving: Mapping[str, Any]) -> dict[Path, QTensor]:
    """Returns the frozen kernels with a bias beside them, by path of the layer."""
    found = {}
    for path, layer in _nodes(serving.get(COLLECTION, {})):
        params = statistics_uses.at(serving.get(PARAMETERS, {}), path)
        entry = layer.get("kernel")
        if not isinstance(params, dict) or "bias" not in params:
            continue
        if not isinstance(entry, dict) or RECORD not in entry:
            continue
        record: FrozenRecord = entry[RECORD]
        check_is_plain("kernel", "/".join(path), record.cfg.fwd)
        found[path] = entry[record.operand.side].in_own_order()
    if not found:
        raise ValueError(
            "correct_biases found no layer with a frozen kernel and a bias: give it "
            "what convert returned, of a model whose layers have biases"
        )
    return found


def _nodes(tree: Any, path: Path = ()) -> Iterable[tuple[Path, dict[str, Any]]]:
    """Returns the nested dictionaries of a collection, with their paths."""
    if isinstance(tree, dict):
        yield path, tree
        for name, node in tree.items():
            yield from _nodes(node, (*path, name))


def _intercepting(kernels: Mapping[Path, QTensor]) -> Any:
    """Returns an interceptor of methods that stores the errors of layers."""
    is_measuring = False

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        nonlocal is_measuring
        out = call(*args, **kwargs)
        layer, frozen = context.module, kernels.get(context.module.path)
        if is_measuring or frozen is None or context.method_name != "__call__":
            return out
        params = nn.meta.unbox(layer.variables[PARAMETERS])
        kernel, bias = params["kernel"], params["bias"]
        if frozen.shape != kernel.shape:
            raise ValueError(
                f"the kernel of {'/'.join(layer.path)!r} has shape {kernel.shape} in "
                f"the call, and {frozen.shape} as it is frozen: correct_biases takes "
                "no layers of nn.scan or nn.vmap"
            )
        # The layer is linear: with the error as kernel, it gives that of its output.
        difference = kernel.astype(jnp.float32) - frozen.dequant().astype(jnp.float32)
        without_bias = {"kernel": difference, "bias": jnp.zeros_like(bias)}
        is_measuring = True
        alone = layer.clone(parent=None, name=None)
        error = alone.apply({PARAMETERS: without_bias}, *args, **kwargs)
        is_measuring = False
        rows = tuple(range(error.ndim - bias.ndim))
        layer.sow(_ERRORS, "error", error.astype(jnp.float32).mean(rows))
        return out

    return intercept


def _mean_of_calls(found: Any, path: Path) -> jax.Array:
    node = statistics_uses.at(found, path)
    if not node:
        raise ValueError(
            f"the call did not reach {'/'.join(path)!r}, or inside of an nn.scan or "
            "nn.vmap: its bias cannot be corrected"
        )
    calls = node["error"]
    return sum(calls[1:], calls[0]) / len(calls)
