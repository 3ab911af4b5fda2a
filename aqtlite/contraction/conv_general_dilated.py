"""A quantized `lax.conv_general_dilated`, and the checks of its call."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from aqtlite import config, noise, operations
from aqtlite.contraction import checks, differentiation, execution, requantization
from aqtlite.qtensor.qtensor import QTensor, axes_in_storage

ConvGeneralDilated = Callable[..., Any]


def make_conv_general_dilated(cfg: config.DotGeneral | None) -> ConvGeneralDilated:
    """Compiles a config into a function like `lax.conv_general_dilated`.

    The config is that of `make_dot_general`: ``fwd.lhs`` is the input, ``fwd.rhs`` the
    kernel, and ``dlhs`` and ``drhs`` are the gradients of the two, which are
    convolutions with the gradient of the output. Along the axes that a convolution sums
    over, elements share a scale: by default an input has one for each example, the
    kernel one for each output feature, and the gradient of the output one for each
    example in ``dlhs`` and one for each output feature in ``drhs``. With as many groups
    as input features (depthwise), the input has one for each example and feature.

    Along the window no scale may vary. What else is summed over can be cut into blocks
    (``blocks``; ``local_aqt`` of a gradient): the input features in ``fwd``, the output
    features in ``dlhs`` and the examples in ``drhs``, of grouped convolutions those of
    each group. A depthwise convolution sums over its window alone, and blocks cut
    nothing there.

    The function is hashable, and the same object for equal configs.

    Args:
        cfg: what to quantize, and how. None, or a config that quantizes nothing,
            gives a function that calls `lax.conv_general_dilated`.

    Returns:
        ``conv_general_dilated(lhs, rhs, window_strides, padding, lhs_dilation=None,
        rhs_dilation=None, dimension_numbers=None, feature_group_count=1,
        batch_group_count=1, precision=None, preferred_element_type=None,
        out_sharding=None, *, key=None, states=None)``.

        The geometry is that of `lax.conv_general_dilated`; everything else is that of
        the function that `make_dot_general` returns. What pads the input is zero on
        every grid.

    Raises:
        TypeError: if `cfg` is not a `config.DotGeneral` or None.
        ValueError: if it has smoothing, which convolutions do not.

    >>> import jax.numpy as jnp
    >>> conv = make_conv_general_dilated(config.fully_quantized())
    >>> x, kernel = jnp.ones((1, 1, 4)), jnp.array([[[1.0, 2.0, 3.0]]])
    >>> conv(x, kernel, (1,), "SAME").round(1).tolist()
    [[[5.0, 6.0, 6.0, 3.0]]]
    """
    checks.check_config(cfg, "make_conv_general_dilated")
    if cfg is not None and cfg.fwd.smoothing is not None:
        raise ValueError(
            "fwd.smoothing is for contractions of axes, and a convolution sums over a "
            "window; leave it None in the config of convolutions"
        )
    return _make(cfg)


@functools.cache
def _make(cfg: config.DotGeneral | None) -> ConvGeneralDilated:
    if cfg is None or not cfg.is_quantized:
        return _unquantized
    return functools.partial(_conv_general_dilated, cfg)


def _unquantized(
    lhs: Any,
    rhs: Any,
    *args: Any,
    key: jax.Array | None = None,
    states: tuple[Any, ...] | None = None,
    **kwargs: Any,
) -> jax.Array:
    """Calls `lax.conv_general_dilated`, and ignores what only quantization needs."""
    del key, states
    checks.check_arrays(lhs, rhs)
    return lax.conv_general_dilated(lhs, rhs, *args, **kwargs)


def _conv_general_dilated(
    cfg: config.DotGeneral,
    lhs: Any,
    rhs: Any,
    window_strides: Sequence[int],
    padding: Any,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    *,
    key: jax.Array | None = None,
    states: tuple[Any, ...] | None = None,
) -> jax.Array | QTensor:
    precision = checks.precision_of_floats(cfg, precision)
    lhs = checks.check_operand(lhs, cfg.fwd.lhs, "fwd.lhs")
    rhs = checks.check_operand(rhs, cfg.fwd.rhs, "fwd.rhs")
    checks.check_not_padded(lhs, "fwd.lhs")
    checks.check_not_padded(rhs, "fwd.rhs")
    operation = operations.ConvGeneralDilated.of(
        lhs.shape,
        rhs.shape,
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        dimension_numbers,
        feature_group_count,
        batch_group_count,
    )
    out_dtype = checks.check_out_dtype(preferred_element_type, lhs, rhs)
    given = checks.check_states(states)
    if isinstance(out_sharding, PartitionSpec):
        out_sharding = NamedSharding(jax.sharding.get_abstract_mesh(), out_sharding)
    lhs, rhs, operation = _as_stored(
        _in_order(lhs, cfg.fwd.lhs), _in_order(rhs, cfg.fwd.rhs), operation
    )
    how = execution.resolve(
        cfg, operation, lhs, rhs, out_dtype, out_sharding, precision
    )
    seed = None if key is None else noise.seed_from_key(key)
    out = differentiation.quantize_and_contract(
        how, operation, lhs, rhs, seed, states=given._replace(smoothing=(), out=())
    )
    return requantization.quantize(out, cfg.out, given.out)


def _in_order(x: Any, tensor: config.Tensor) -> Any:
    """A float convolution sums in an order that depends on where the axes lie."""
    if not isinstance(x, QTensor) or (tensor.is_integer and not tensor.use_fake_quant):
        return x
    return x.in_own_order()


def _as_stored(
    lhs: Any, rhs: Any, operation: operations.ConvGeneralDilated
) -> tuple[Any, Any, operations.ConvGeneralDilated]:
    """Convolves the axes of a `QTensor` where they lie; nothing is transposed."""
    if not isinstance(lhs, QTensor) and not isinstance(rhs, QTensor):
        return lhs, rhs, operation
    forward = operation.forward
    stored = dataclasses.replace(
        forward,
        lhs_spec=axes_in_storage(lhs, forward.lhs_spec),
        rhs_spec=axes_in_storage(rhs, forward.rhs_spec),
    )
    lhs, rhs = (x.as_stored() if isinstance(x, QTensor) else x for x in (lhs, rhs))
    shapes = lhs.shape, rhs.shape, operation.shapes[2]
    return lhs, rhs, dataclasses.replace(operation, forward=stored, shapes=shapes)
