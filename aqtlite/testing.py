"""Assertions for tests of quantized models and kernels."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from aqtlite import config
from aqtlite.flax import convert
from aqtlite.jaxpr import registry
from aqtlite.program.quantize import quantize_function
from aqtlite.program.rules import Rule
from aqtlite.program.serving.frozen_record import COLLECTION

_INT8 = config.fully_quantized(use_stochastic_rounding=False)

_ADVICE = (
    "Contractions of integers give the same in both programs, but float code around "
    "them is compiled anew in each and may be fused otherwise: docs/serving.md says "
    "what is promised. To find the operation, compare the outputs of parts of the model"
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
    _assert_equal(type(model).__name__, trained, served)


def assert_kernel_equals_reference(
    name: str,
    kernel: Callable[..., Any],
    *args: Any,
    cfg: config.DotGeneral = _INT8,
    tolerance: float = 1e-3,
    differentiate: Sequence[int] | None = None,
    mapped: Sequence[int] = (0, 1, -1),
) -> None:
    """Asserts that a kernel agrees with its registered reference, quantized or not.

    Compares the kernel with the reference given to `aqtlite.register_operation`, and
    the quantized kernel (by a rule for `name`) with the quantized reference. Values and
    gradients are compared under `jax.jit`, on the given arrays and, under `jax.vmap`,
    on stacks of them mapped over each axis of `mapped`.

    >>> from jax.experimental import pallas
    >>> import aqtlite
    >>> def scaled_product(x, w):
    ...     def scaled_product_kernel(x, w, out):
    ...         out[...] = 2 * x[...] @ w[...]
    ...     shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    ...     call = pallas.pallas_call(scaled_product_kernel, shape, interpret=True)
    ...     return call(x, w)
    >>> def reference(x, w):
    ...     return 2 * jnp.einsum("nk,km->nm", x, w)
    >>> aqtlite.register_operation("scaled_product_kernel", reference)
    >>> x, w = jnp.linspace(-1, 1, 12).reshape(2, 6), jnp.ones((6, 4))
    >>> assert_kernel_equals_reference(
    ...     "scaled_product_kernel", scaled_product, x, w, differentiate=()
    ... )

    Args:
        name: name of the registered operation.
        kernel: function of the arrays that calls the operation.
        *args: arrays. A stack holds one array with its elements rolled.
        cfg: config of the rule, without stochastic rounding: the noise would differ.
        tolerance: largest difference allowed, relative to the largest magnitude of each
            result.
        differentiate: positions of the arguments for which the kernel's gradients are
            compared; () for a kernel without gradients. None: all floating arguments.
            When quantized, the gradients of all floating arguments are compared.
        mapped: axes to map; () if `jax.vmap` cannot map the kernel, as with
            `ragged_dot`.

    Raises:
        AssertionError: if results differ; the message names the comparison and the
            largest difference.
        ValueError: if no operation of this name is registered, the kernel does not call
            it, or the reference does not accept its arrays.
    """
    reference = registry.reference_of(name)
    floats = [
        i
        for i, x in enumerate(args)
        if jnp.issubdtype(jnp.result_type(x), jnp.floating)
    ]
    differentiated = floats if differentiate is None else differentiate
    rules = Rule(op=name, cfg=cfg), Rule(cfg=cfg)
    for axis in (None, *mapped):
        where, functions, given = f"the kernel {name!r}", [kernel, reference], args
        if axis is not None:
            axes = tuple(_axis_of(x, axis) for x in args)
            where = f"{where}, mapped over axis {axis},"
            functions = [jax.vmap(one, axes, axis) for one in functions]
            given = _stacks(args, axes)
        found, wanted = (_values(one, differentiated, given) for one in functions)
        _assert_close(where, found, wanted, tolerance)
        quantized = (
            quantize_function(one, rule, strict=True)
            for one, rule in zip(functions, rules, strict=True)
        )
        found, wanted = (_values(one, floats, given) for one in quantized)
        _assert_close(f"{where} quantized,", found, wanted, tolerance)


def _axis_of(x: Any, axis: int) -> int:
    """The stacking axis of an array, at most its rank: a vector has no middle axis."""
    return axis if axis < 1 else min(axis, jnp.ndim(x))


def _stacks(args: Sequence[Any], axes: Sequence[int]) -> tuple[Any, ...]:
    """Stacks each array with rolled copies.

    The size of the stack is unlike that of any axis, so shapes tell which is mapped.
    """
    sizes = {size for x in args for size in jnp.shape(x)}
    count = next(n for n in itertools.count(2) if n not in sizes)
    return tuple(
        jnp.stack([jnp.roll(jnp.asarray(x), i) for i in range(count)], axis)
        for x, axis in zip(args, axes, strict=True)
    )


def _values(
    function: Callable[..., Any], differentiate: Sequence[int], args: Sequence[Any]
) -> dict[str, Any]:
    """The results of a function, and the gradients of the sum of their sines."""

    @jax.jit
    def run(*args: Any) -> dict[str, Any]:
        def loss(*args: Any) -> tuple[Any, Any]:
            out = function(*args)
            return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(out)), out

        if not differentiate:
            return {"result": function(*args), "gradient": ()}
        gradients, out = jax.grad(loss, tuple(differentiate), has_aux=True)(*args)
        return {"result": out, "gradient": gradients}

    return run(*args)


def _assert_close(
    where: str,
    found: Mapping[str, Any],
    wanted: Mapping[str, Any],
    tolerance: float,
) -> None:
    for what in ("result", "gradient"):
        pairs = zip(*(jax.tree.leaves(x[what]) for x in (found, wanted)), strict=True)
        for number, (one, other) in enumerate(pairs):
            kinds = [f"{x.dtype} of shape {x.shape}" for x in (one, other)]
            if kinds[0] != kinds[1]:
                raise AssertionError(
                    f"{where} has {kinds[0]} for {what} {number}, and its reference "
                    f"{kinds[1]}"
                )
            first, second = (np.asarray(x, np.float64) for x in (one, other))
            largest = np.max(np.abs(second), initial=0)
            difference = np.max(np.abs(first - second), initial=0)
            if not difference <= tolerance * largest:
                raise AssertionError(
                    f"{where} differs from its reference in {what} {number} by up to "
                    f"{difference:.3g}, where the largest is {largest:.3g}"
                )


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


def _assert_equal(name: str, trained: Any, served: Any) -> None:
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
                f"{difference}. {_ADVICE}"
            )


def _difference(trained: jax.Array, served: jax.Array) -> str | None:
    """Describes the difference; None if there is none."""
    kinds = [f"{x.dtype} of shape {x.shape}" for x in (trained, served)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]}: it is served as {kinds[1]}"
    if jnp.issubdtype(trained.dtype, jax.dtypes.prng_key):
        trained, served = jax.random.key_data(trained), jax.random.key_data(served)
    first, second = np.asarray(trained), np.asarray(served)
    differs = (_bytes(first) != _bytes(second)).any(-1)
    if jnp.issubdtype(trained.dtype, jnp.inexact):
        differs &= ~(np.isnan(first) & np.isnan(second))
    if not differs.any():
        return None
    wide = np.complex128 if jnp.iscomplexobj(trained) else np.float64
    first, second = first.astype(wide), second.astype(wide)
    with np.errstate(all="ignore"):
        distance = np.abs(first - second)[differs]
        relative = distance / np.abs(first)[differs]
    at = tuple(int(i) for i in np.argwhere(differs)[0])
    return (
        f"{kinds[0]}: {differs.sum()} of {differs.size} elements differ, by up to "
        f"{np.max(distance):.3g} (relative {np.max(relative):.3g}); the first at {at}, "
        f"{first[at]!s} trained and {second[at]!s} served"
    )


def _bytes(x: np.ndarray) -> np.ndarray:
    """Returns the bytes of each element, along a new last axis."""
    flat = np.frombuffer(x.tobytes(), np.uint8)
    return flat.reshape(*x.shape, x.dtype.itemsize)
