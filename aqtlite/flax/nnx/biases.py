"""Corrects the biases of converted models for the mean errors of their kernels."""

from collections.abc import Iterable
from typing import Any, cast

import jax
from flax import nnx

from aqtlite.flax.nnx.calls import function_of
from aqtlite.flax.nnx.model import collection_of, state_of
from aqtlite.flax.nnx.pure import PureCall
from aqtlite.flax.nnx.quantize import M, as_quantized, check_quantized
from aqtlite.program import biases
from aqtlite.program.convert import frozen_by_module, program_of


def correct_biases(
    model: nnx.Module,
    serving: M,
    batches: Iterable[Any],
    *,
    method: str = "__call__",
    **kwargs: Any,
) -> M:
    """Adds the mean error of each layer's outputs to its bias (Nagel et al. 2019).

    A kernel W that is rounded to Q changes the mean of the outputs by ``E[x] (Q - W)``,
    which the bias can take back (arXiv:1906.04721, section 4.2). The inputs ``x`` are
    those of the float model, in its current mode. The bias of a layer is the parameter
    that is added to the result of its contraction; layers without one, and those in
    `nnx.scan`, stay as they are.

    >>> import jax.numpy as jnp
    >>> from aqtlite import config
    >>> from aqtlite.flax.nnx import convert, quantize_model
    >>> model = quantize_model(
    ...     nnx.Linear(3, 4, rngs=nnx.Rngs(0)), config.weight_only(3)
    ... )
    >>> x = jnp.linspace(0, 1, 24).reshape(8, 3)
    >>> serving = correct_biases(model, convert(model, x), [x])
    >>> exact = x @ model.kernel + model.bias
    >>> bool(jnp.abs((serving(x) - exact).mean(0)).max() < 1e-6)
    True

    Args:
        model: the quantized model with its float parameters.
        serving: what `convert` made of it.
        batches: the inputs, each a tuple of positional arguments or a single argument;
            all of their elements count alike: there is no mask=. A batch that gives
            NaN or infinity is left out, with a warning.
        method: name of the method to call.
        **kwargs: keyword arguments of the method, constants of the program.

    Returns:
        A copy of `serving` with other biases.

    Raises:
        TypeError: if `serving` is not quantized, or as for `calibrate`.
        ValueError: if there is no batch or no such layer, or for a layer with smoothing
            or rotation.
    """
    quantized = as_quantized(model)
    converted = check_quantized(serving, "correct_biases")
    collection = collection_of(converted)

    @jax.jit
    def errors(graphdef: Any, state: Any, collection: Any) -> biases.Errors:
        copy, args = nnx.merge(graphdef, state)
        call = PureCall(copy, method, args, kwargs)
        params, *others = call.arguments
        function = function_of(copy, call)
        program = program_of(function, params, tuple(others), {}, state_of(copy))
        values = program.traced.values((call.arguments, {}))
        frozen = biases.frozen_of(program, frozen_by_module(collection))
        return biases.errors_of(
            program.traced.jaxpr, program.parameters, values, frozen
        )

    def of_batch(args: tuple[Any, ...]) -> biases.Errors:
        return errors(*nnx.split((quantized, args), graph=True), collection)

    total = biases.mean_errors(of_batch, batches, nnx.state((quantized, converted)))
    corrected = nnx.clone(converted)
    call = PureCall(corrected, method, (), {})
    call.replace_params(biases.with_errors(call.params, total))
    return cast(M, corrected)
