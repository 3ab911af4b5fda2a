"""The quantized `conv_general_dilated` to inject into Flax Linen layers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import linen as nn

from aqtlite import operations
from aqtlite.contraction.contract import Options
from aqtlite.flax.injectable import injectable
from aqtlite.flax.linen.caller import find_caller, path_of
from aqtlite.flax.linen.dot_general import Injected, as_operands
from aqtlite.qtensor.qtensor import QTensor


@injectable
@dataclasses.dataclass(frozen=True)
class AqtConvGeneralDilated(Injected):
    """A quantized `conv_general_dilated` for `nn.Conv` and modules.

    Pass it as `conv_general_dilated=` of a layer, or as
    ``functools.partial(AqtConvGeneralDilated, cfg)`` for `conv_general_dilated_cls=`.
    Its fields, and its behavior in training, calibration and serving, are those of
    `AqtDotGeneral`.

    >>> import flax.linen as nn, jax.numpy as jnp
    >>> from aqtlite import config
    >>> conv = nn.Conv(
    ...     4, (3, 3), conv_general_dilated=AqtConvGeneralDilated(
    ...         config.fully_quantized()))
    >>> variables = conv.init(jax.random.key(0), jnp.ones((2, 8, 8, 3)))
    >>> conv.apply(variables, jnp.ones((2, 8, 8, 3))).shape
    (2, 8, 8, 4)
    """

    def __call__(
        self,
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
    ) -> jax.Array | QTensor:
        """Convolves like `jax.lax.conv_general_dilated`.

        See `aqtlite.make_conv_general_dilated`.
        """
        lhs, rhs = as_operands(lhs, rhs)
        if self.cfg is not None:
            _check_is_shared()
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
        options = Options(precision, preferred_element_type, out_sharding, key)
        return self.run(operation, lhs, rhs, options)


def _check_is_shared() -> None:
    """Raises ValueError inside `nn.ConvLocal`, which would not use the result."""
    caller = find_caller()
    if caller.scope is not None and isinstance(caller.module, nn.ConvLocal):
        raise ValueError(
            f"{path_of(caller.scope)} is an nn.ConvLocal, which asks a quantized "
            "convolution for the shape of its result alone, and would compute in "
            "float: leave its conv_general_dilated None"
        )
