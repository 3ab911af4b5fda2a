"""A quantized `lax.conv_general_dilated`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from aqtlite import config, operations
from aqtlite.contraction.contract import Options, as_operands, contract, with_config
from aqtlite.contraction.given_arguments import checks_arguments
from aqtlite.qtensor.qtensor import QTensor

ConvGeneralDilated = Callable[..., Any]


def make_conv_general_dilated(cfg: config.DotGeneral | None) -> ConvGeneralDilated:
    """Compiles a config into a function like `lax.conv_general_dilated`.

    The config reads as in `make_dot_general`: ``fwd.lhs`` is the input, ``fwd.rhs`` the
    kernel, and ``dlhs`` and ``drhs`` are their gradients, which are convolutions with
    the gradient of the output. Elements share a scale along the axes that a convolution
    sums over: by default the input has a scale for each example, the kernel one for
    each output feature, and the gradient of the output one for each example in ``dlhs``
    and one for each output feature in ``drhs``. In a depthwise convolution (as many
    groups as input features), the input has a scale for each example and feature.

    No scale may vary along the window. The other contracting axes can be cut into
    blocks (``blocks``; ``local_aqt`` of a gradient): the input features in ``fwd``, the
    output features in ``dlhs`` and the examples in ``drhs``; in grouped convolutions,
    within each group. A depthwise convolution sums over its window alone, so blocks cut
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

        The geometry is as in `lax.conv_general_dilated`; everything else is as in the
        function that `make_dot_general` returns. The padding of the input is zero on
        every grid.

    Raises:
        TypeError: if `cfg` is not a `config.DotGeneral` or None.
        ValueError: if the config has smoothing, which convolutions do not support.

    >>> import jax.numpy as jnp
    >>> conv = make_conv_general_dilated(config.fully_quantized())
    >>> x, kernel = jnp.ones((1, 1, 4)), jnp.array([[[1.0, 2.0, 3.0]]])
    >>> conv(x, kernel, (1,), "SAME").round(1).tolist()
    [[[5.0, 6.0, 6.0, 3.0]]]
    """
    made = with_config(_conv_general_dilated, cfg)
    if cfg is not None and cfg.fwd.smoothing is not None:
        raise ValueError(
            "fwd.smoothing is for contractions of axes, and a convolution sums over a "
            "window; leave it None in the config of convolutions"
        )
    return made


@checks_arguments
def _conv_general_dilated(
    cfg: config.DotGeneral | None,
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
    lhs, rhs = as_operands(lhs, rhs)
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
    options = Options(precision, preferred_element_type, out_sharding, key, states)
    return contract(cfg, operation, lhs, rhs, options)
