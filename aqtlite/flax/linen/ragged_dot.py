"""The quantized `ragged_dot` for Flax Linen modules."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from aqtlite import config
from aqtlite.contraction import ragged_dot
from aqtlite.flax.injectable import injectable
from aqtlite.flax.linen.dot_general import Injected, check_operands
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization.statistics import States


@injectable
@dataclasses.dataclass(frozen=True)
class AqtRaggedDot(Injected):
    """A quantized `ragged_dot` for Flax modules: mixture-of-experts layers.

    Call it in place of `jax.lax.ragged_dot`, inside a module. It has the fields of
    `AqtDotGeneral`, and what holds there holds here: `convert` freezes the weights of
    the experts; statistics and learned parameters are kept by the module that makes the
    call, and two calls in one module need a `name` each for them.

    >>> import jax.numpy as jnp
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
        check_operands(lhs, rhs)
        lhs, rhs = (x if isinstance(x, QTensor) else jnp.asarray(x) for x in (lhs, rhs))

        def contract(
            cfg: config.DotGeneral, lhs: Any, rhs: Any, key: Any, states: States
        ) -> jax.Array:
            return ragged_dot.make_ragged_dot(cfg)(
                lhs,
                rhs,
                group_sizes,
                precision,
                preferred_element_type,
                group_offset,
                out_sharding,
                key=key,
                states=states,
            )

        operation = ragged_dot.ragged_operation(lhs, rhs, group_sizes)
        if self.cfg is not None:  # Statistics are those of what is contracted.
            lhs = ragged_dot.zeros_behind_groups(operation, lhs)
        return self.run(operation, lhs, rhs, key, contract)
