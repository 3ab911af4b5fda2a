"""One quantized contraction of any operation, from its arguments to its result.

Before: `operations/base.py`, the operation to contract by.
Next: `contraction/execution.py`, which form each part of it takes.

`contract` is the only entry point: the functions with `jax.lax`'s signatures, einsums,
the Flax modules and the rules make an operation and call it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from aqtlite import config, errors, noise
from aqtlite.contraction import (
    checks,
    coded_products,
    differentiation,
    execution,
    requantization,
    unit_blocks,
)
from aqtlite.jaxpr import counted
from aqtlite.operations import Operation, Side
from aqtlite.qtensor.qtensor import Operand, QTensor, dequantized
from aqtlite.quantization.checks import as_array
from aqtlite.quantization.preparation import padding, preparation
from aqtlite.quantization.states.statistics import States
from aqtlite.shapes.dimension_numbers import Axes
from aqtlite.shapes.sharding import before_transposition


class Options(NamedTuple):
    """The arguments of a contraction besides its operands."""

    precision: Any = None
    """Precision of contractions that the config leaves in floats, as in `jax.lax`."""

    preferred_element_type: Any = None
    """Dtype of the result; None for the promoted dtype of the operands."""

    out_sharding: Any = None
    """Sharding of the result, on a mesh with explicit axes, as `jax.lax` takes it."""

    key: jax.Array | None = None
    """Key of stochastic rounding; None seeds it from the operands."""

    states: Any = None
    """`aqtlite.statistics.States`; None for calibrations without states."""

    order: Axes | None = None
    """Permutation of the axes of the operation's result; None for none."""

    @property
    def sharding_in_own_order(self) -> Any:
        """Sharding of the operation's result, before its axes are permuted."""
        if self.order is None:
            return self.out_sharding
        return before_transposition(self.out_sharding, self.order)

    def ordered(self, out: jax.Array) -> jax.Array:
        """Permutes the axes of the operation's result."""
        return out if self.order is None else out.transpose(self.order)


InFloats = Callable[[config.DotGeneral, Operation, Operand, Operand, Any], jax.Array]
"""Function that stands for quantized contractions in a trace.

Its arguments are the config, the operation, the operands after smoothing and rotation,
and the dtype of the result.
"""

# A user context is part of JAX's cache keys, so traces with and without it stay apart.
_in_place = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def replaced_by(function: InFloats) -> Iterator[None]:
    """Lets a hashable function stand for quantized contractions in what is traced."""
    with _in_place(function):
        yield


def is_product(
    cfg: config.DotGeneral, operation: Operation, rhs_shape: tuple[int, ...]
) -> bool:
    """Whether a contraction stays in float, because each sum has one product.

    Where the scales of one operand multiply the other, the contracted elements are
    positions: those of a sequence of one are quantized as in any longer sequence.

    Args:
        cfg: config of the contraction.
        operation: the contraction.
        rhs_shape: shape of the right operand.
    """
    scale_moves = cfg.fwd.lhs.scale_moves or cfg.fwd.rhs.scale_moves
    return operation.sums_one(rhs_shape) and not scale_moves


def contract(
    cfg: config.DotGeneral | None,
    operation: Operation,
    lhs: Any,
    rhs: Any,
    options: Options,
) -> jax.Array | QTensor:
    """Contracts two operands, quantized by a config.

    Args:
        cfg: Config; None, or one that quantizes nothing, contracts as `jax.lax` does.
            A contraction whose sums have one product each stays in float.
        operation: Contraction, made for the shapes of the operands.
        lhs: Floating array, or a `QTensor` in place of one that `cfg` quantizes, as
            `as_operands` returns them.
        rhs: Floating array, or a `QTensor`.
        options: Other arguments.

    Returns:
        An array; a `QTensor` where ``cfg.out`` quantizes the result.

    Raises:
        TypeError: if the config does not quantize operands of such a type or grid, if
            the states are not `States`, or if the dtype of the result is not floating.
        ValueError: if the config does not fit the operands, or needs something that
            the operation does not support.
    """
    if cfg is None or not cfg.is_quantized:
        checks.check_arrays(lhs, rhs)
        kind = options.precision, options.preferred_element_type
        out = operation.in_float(lhs, rhs, *kind, options.sharding_in_own_order)
        return options.ordered(out)
    if counted.is_counting():
        return _with_mask_of_float(cfg, operation, lhs, rhs, options)
    checks.check_operand(lhs, cfg.fwd.lhs, operation, "fwd.lhs")
    checks.check_operand(rhs, cfg.fwd.rhs, operation, "fwd.rhs")
    if not operation.takes_sharding:
        checks.check_no_sharding(operation, lhs, rhs, options.out_sharding)
    out_dtype = checks.out_dtype(options.preferred_element_type, lhs, rhs)
    states = checks.checked_states(options.states)
    if is_product(cfg, operation, rhs.shape):
        # A scale of a single element loses it, and saves nothing.
        cfg = config.DotGeneral(out=cfg.out)
        lhs, rhs = map(dequantized, (lhs, rhs))
        states = States(out=states.out)
    precision = checks.precision_of_floats(cfg, operation, options.precision)
    if cfg.fwd.rotation is not None:
        checks.check_rotated(lhs, "fwd.lhs", cfg.fwd.rotation)
        checks.check_rotated(rhs, "fwd.rhs", cfg.fwd.rotation)
    if cfg.fwd.is_prepared:
        lhs, rhs = preparation.prepare(cfg.fwd, operation, lhs, rhs, states.smoothing)
    if _in_place.value is not None:
        return options.ordered(_in_place.value(cfg, operation, lhs, rhs, out_dtype))
    options = options._replace(precision=precision, preferred_element_type=out_dtype)
    out = options.ordered(_of_prepared(cfg, operation, lhs, rhs, options, states))
    if not cfg.out.is_quantized:
        return out
    return requantization.quantize(out, cfg.out, states.out)


def _of_prepared(
    cfg: config.DotGeneral,
    operation: Operation,
    lhs: Operand,
    rhs: Operand,
    options: Options,
    states: States,
) -> jax.Array:
    """Quantizes and contracts operands that are smoothed and rotated.

    Returns:
        The result in the operation's own order of axes.
    """
    if isinstance(lhs, QTensor):
        operation, lhs = _in_storage(operation, "lhs", lhs, cfg.fwd.lhs)
    if isinstance(rhs, QTensor):
        operation, rhs = _in_storage(operation, "rhs", rhs, cfg.fwd.rhs)
    if not isinstance(lhs, QTensor):
        lhs = operation.masked(lhs)
    shape = operation.output_shape(lhs.shape, rhs.shape)
    tensors = cfg.fwd.lhs, cfg.fwd.rhs
    has_blocks = any(tensor.blocks is not None for tensor in tensors)
    if has_blocks or isinstance(lhs, QTensor) or isinstance(rhs, QTensor):
        lhs, rhs = padding.pad_operands(operation, lhs, rhs, tensors, "fwd")
    out_sharding = options.sharding_in_own_order
    if isinstance(out_sharding, PartitionSpec):
        out_sharding = NamedSharding(jax.sharding.get_abstract_mesh(), out_sharding)
    out_dtype, precision = options.preferred_element_type, options.precision
    how = execution.resolve(
        cfg, operation, lhs, rhs, out_dtype, out_sharding, precision
    )
    seed = None if options.key is None else noise.seed_from_key(options.key)
    inner = states._replace(smoothing=(), out=(), moment=())
    out = differentiation.quantize_and_contract(
        how, operation, lhs, rhs, seed, states=inner
    )
    if out.shape != shape:
        out = padding.crop(out, shape)
    # The gradient of the output may be anything in masked rows.
    return operation.masked(out)


def _with_mask_of_float(
    cfg: config.DotGeneral, operation: Operation, lhs: Any, rhs: Any, options: Options
) -> jax.Array | QTensor:
    """Contracts two operands, and lets the result count where the float one does."""
    unquantized = cfg.with_float_out()
    of_axes = Options(
        preferred_element_type=checks.out_dtype(
            options.preferred_element_type, lhs, rhs
        ),
        order=options.order,
    )

    def run(cfg: Any, lhs: Any, rhs: Any, options: Options) -> jax.Array:
        return cast(jax.Array, contract(cfg, operation, lhs, rhs, options))

    in_float = None
    if type(operation).in_float is not Operation.in_float:
        in_float = run(None, dequantized(lhs), dequantized(rhs), of_axes)
    out = counted.like(lambda: run(unquantized, lhs, rhs, options), in_float)
    if not cfg.out.is_quantized:
        return out
    states = checks.checked_states(options.states)
    return requantization.quantize(out, cfg.out, states.out)


def _in_storage(
    operation: Operation, side: Side, x: QTensor, tensor: config.Tensor
) -> tuple[Operation, QTensor]:
    """A `QTensor` in its grid's dtype, and the contraction of its axes as stored.

    Sums of floats depend on the order of the axes, exact sums do not: only for exact
    sums do the axes keep their stored order. Values that a kernel may read stay as they
    are stored.
    """
    if side == "rhs" and _reads_rhs(operation, x):
        return operation, x.with_values_as_stored()
    x = x.on_grid()
    if x.order is None:
        return operation, x
    is_exact = tensor.is_integer or operation.pairs_elements
    if is_exact and not tensor.use_fake_quant:
        stored = operation.in_storage(side, x.stored_axes)
        if stored is not None:
            return stored, x.as_stored()
    return operation, x.in_own_order()


def _reads_rhs(operation: Operation, rhs: QTensor) -> bool:
    """Whether a kernel reads the floats of rhs as they are stored: with contracting
    axes last, or codes in their own order."""
    contracting, _, remaining, *_ = operation.axes("rhs")
    order = tuple(rhs.stored_axes[axis] for axis in remaining + contracting)
    own = tuple(range(rhs.ndim))
    if order == own and unit_blocks.reads_rhs(operation, rhs):
        return True
    has_codes = rhs.qvalue.dtype == jnp.int4 and own in (order, rhs.stored_axes)
    return has_codes and coded_products.reads_rhs(operation, rhs)


def with_config(function: Callable[..., Any], cfg: Any) -> Callable[..., Any]:
    """Binds a config to a function of a config and operands.

    Returns:
        The same object for equal arguments, which makes it hashable by value.

    Raises:
        TypeError: if `cfg` is anything but a config or None.
    """
    if cfg is not None and not isinstance(cfg, config.DotGeneral):
        raise TypeError(
            f"make{function.__name__} takes a config.DotGeneral or None, got "
            f"{errors.brief(cfg)}; presets such as config.fully_quantized() make one"
        )
    return _partial(function, cfg)


_partial = functools.cache(functools.partial)


def as_operands(lhs: Any, rhs: Any) -> tuple[Operand, Operand]:
    """Returns operands as arrays or `QTensor`s; raises TypeError for others."""
    return as_operand(lhs, "fwd.lhs"), as_operand(rhs, "fwd.rhs")


def as_operand(x: Any, path: str) -> Operand:
    """Returns an operand as an array or a `QTensor`; raises TypeError for others."""
    if isinstance(x, str):
        raise TypeError(
            f"{path} must be an array, got the equation {x!r}; "
            "AqtEinsum(cfg)(equation, lhs, rhs) and aqtlite.einsum take one"
        )
    return x if isinstance(x, QTensor) else as_array(x, path)
