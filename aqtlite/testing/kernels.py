"""A kernel computes what its registered reference does."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import config
from aqtlite.jaxpr import registry
from aqtlite.program.quantize import quantize_function
from aqtlite.program.rules.rules import Rule

_INT8 = config.fully_quantized(use_stochastic_rounding=False)


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
