"""The quantized `ragged_dot` for Flax Linen modules."""

import dataclasses
from typing import Any

import jax

from aqtlite.contraction.contract import Options
from aqtlite.contraction.ragged_dot import ragged_operation
from aqtlite.flax.injectable import injectable
from aqtlite.flax.linen.dot_general import Injected, as_operands
from aqtlite.qtensor.qtensor import QTensor


@injectable
@dataclasses.dataclass(frozen=True)
class AqtRaggedDot(Injected):
    """A quantized `ragged_dot` for Flax modules: mixture-of-experts layers.

    Call it instead of `jax.lax.ragged_dot` inside a module. Its fields and behavior are
    those of `AqtDotGeneral`: `convert` freezes the weights of the experts; the calling
    module keeps statistics and learned parameters, for which two calls in one module
    each need a `name`.

    >>> import jax.numpy as jnp
    >>> from aqtlite import config
    >>> ragged_dot = AqtRaggedDot(config.fully_quantized())
    >>> tokens, experts = jnp.ones((5, 4)), jnp.ones((2, 4, 3))
    >>> ragged_dot(tokens, experts, jnp.array([2, 3])).shape
    (5, 3)
    """

    def __call__(
        self,
        lhs: Any,
        rhs: Any,
        group_sizes: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        group_offset: Any = None,
        out_sharding: Any = None,
        *,
        key: jax.Array | None = None,
    ) -> jax.Array | QTensor:
        """Contracts like `jax.lax.ragged_dot`; see `aqtlite.make_ragged_dot`."""
        lhs, rhs = as_operands(lhs, rhs)
        operation = ragged_operation(lhs, rhs, group_sizes, group_offset)
        if self.cfg is not None and not isinstance(lhs, QTensor):
            lhs = operation.masked(lhs)  # Rows of no group are not in the statistics.
        options = Options(precision, preferred_element_type, out_sharding, key)
        return self.run(operation, lhs, rhs, options)
