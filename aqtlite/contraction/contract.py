"""One quantized contraction, whatever its operation, from its arguments to its result.

`contract` is the one way in: the functions with `jax.lax`'s signatures, einsums, the
modules of Flax and the rules make an operation, and call it.
"""

from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from aqtlite import config, noise
from aqtlite.contraction import checks, differentiation, execution, requantization
from aqtlite.operations import Operation, Side
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization import padding, smoothing
from aqtlite.shapes.dimension_numbers import Axes
from aqtlite.shapes.sharding import before_transposition


class Options(NamedTuple):
    """The arguments of a contraction beside its operands."""

    precision: Any = None
    """Precision of what the config leaves in floats, as `jax.lax` takes it."""

    preferred_element_type: Any = None
    """Dtype of the result; None for that of the operands, promoted."""

    out_sharding: Any = None
    """Sharding of the result, on a mesh with explicit axes, as `jax.lax` takes it."""

    key: jax.Array | None = None
    """Seed of stochastic rounding; None seeds it from the operands."""

    states: Any = None
    """`aqtlite.statistics.States`; None for calibrations that have none."""

    order: Axes | None = None
    """Permutation of the axes of the operation's result; None for none."""


def contract(
    cfg: config.DotGeneral | None,
    operation: Operation,
    lhs: Any,
    rhs: Any,
    options: Options,
) -> jax.Array | QTensor:
    """Contracts two operands, quantized as a config says.

    Args:
        cfg: Config; None, or one that quantizes nothing, contracts as `jax.lax` does.
        operation: Contraction of operands of these shapes.
        lhs: Floating array, or a `QTensor` in place of one that `cfg` quantizes, as
            `checks.as_operands` returns them.
        rhs: Floating array, or a `QTensor`.
        options: Other arguments.

    Returns:
        An array; a `QTensor` where ``cfg.out`` quantizes the result.

    Raises:
        TypeError: if an operand is not what the config quantizes, or if the states or
            the dtype of the result are of another type.
        ValueError: if the config does not fit the operands, or asks of the operation
            what it does not have.
    """
    order, out_sharding = options.order, options.out_sharding
    if order is not None:
        out_sharding = before_transposition(out_sharding, order)
    if cfg is None or not cfg.is_quantized:
        checks.check_arrays(lhs, rhs)
        kind = options.precision, options.preferred_element_type
        out = operation.in_float(lhs, rhs, *kind, out_sharding)
        return out if order is None else out.transpose(order)
    precision = checks.precision_of_floats(cfg, operation, options.precision)
    checks.check_operand(lhs, cfg.fwd.lhs, operation, "fwd.lhs")
    checks.check_operand(rhs, cfg.fwd.rhs, operation, "fwd.rhs")
    if not operation.takes_sharding:
        checks.check_no_sharding(lhs, rhs, out_sharding)
    out_dtype = checks.check_out_dtype(options.preferred_element_type, lhs, rhs)
    states = checks.check_states(options.states)
    if isinstance(out_sharding, PartitionSpec):
        out_sharding = NamedSharding(jax.sharding.get_abstract_mesh(), out_sharding)
    if cfg.fwd.smoothing is not None:
        dims = smoothing.dims_of(operation)
        lhs, rhs = smoothing.smooth(cfg.fwd, lhs, rhs, dims, states.smoothing)
    if isinstance(lhs, QTensor):
        operation, lhs = _in_storage(operation, "lhs", lhs, cfg.fwd.lhs)
    if isinstance(rhs, QTensor):
        operation, rhs = _in_storage(operation, "rhs", rhs, cfg.fwd.rhs)
    if not isinstance(lhs, QTensor):
        lhs = operation.masked(lhs)
    shape = operation.output_shape(lhs.shape, rhs.shape)
    tensors = cfg.fwd.lhs, cfg.fwd.rhs
    lhs, rhs = padding.pad_operands(operation, lhs, rhs, tensors, "fwd")
    how = execution.resolve(
        cfg, operation, lhs, rhs, out_dtype, out_sharding, precision
    )
    seed = None if options.key is None else noise.seed_from_key(options.key)
    inner = states._replace(smoothing=(), out=())
    out = differentiation.quantize_and_contract(
        how, operation, lhs, rhs, seed, states=inner
    )
    # What reads the rows that are masked may be given any gradient there.
    out = operation.masked(padding.crop(out, shape))
    if order is not None:
        out = out.transpose(order)
    if not cfg.out.is_quantized:
        return out
    return requantization.quantize(out, cfg.out, states.out)


def _in_storage(
    operation: Operation, side: Side, x: QTensor, tensor: config.Tensor
) -> tuple[Operation, QTensor]:
    """Contracts the axes of a `QTensor` where they lie, if that gives equal sums.

    Sums of floats depend on the order of the axes, exact ones do not.
    """
    if x.order is None:
        return operation, x
    is_exact = tensor.is_integer or operation.pairs_elements
    if is_exact and not tensor.use_fake_quant:
        stored = operation.in_storage(side, x.stored_axes)
        if stored is not None:
            return stored, x.as_stored()
    return operation, x.in_own_order()
