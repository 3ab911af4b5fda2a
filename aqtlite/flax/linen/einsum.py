"""The quantized einsum for Flax modules."""

import dataclasses
import functools
import re
from typing import Any

import jax

from aqtlite.contraction import requantization
from aqtlite.contraction.einsum import contract
from aqtlite.flax.injectable import injectable
from aqtlite.flax.linen.dot_general import (
    AqtDotGeneral,
    Injected,
    check_operands,
    quantize_output,
)
from aqtlite.qtensor.qtensor import QTensor

_NO_LETTER = re.compile("[^a-zA-Z]+")


@injectable
@dataclasses.dataclass(frozen=True)
class AqtEinsum(Injected):
    """A quantized einsum for Flax modules: `AqtDotGeneral` behind an equation.

    Pass it also as `qk_attn_weights_einsum=` and `attn_weights_value_einsum=` of
    `nn.dot_product_attention`. Its fields are those of `AqtDotGeneral`.

    >>> import jax.numpy as jnp
    >>> from aqtlite import config
    >>> einsum = AqtEinsum(config.fully_quantized())
    >>> einsum("bk,kn->bn", jnp.ones((2, 3)), jnp.ones((3, 4))).shape
    (2, 4)
    """

    def __call__(
        self,
        eqn: str,
        lhs: Any,
        rhs: Any,
        *,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
        key: jax.Array | None = None,
    ) -> jax.Array | QTensor:
        """Evaluates the equation like `jnp.einsum`; see `aqtlite.einsum`."""
        if not isinstance(eqn, str):
            raise TypeError(
                f"AqtEinsum takes an equation and two arrays, got {type(eqn).__name__} "
                "in place of the equation; where a layer takes dot_general=, pass "
                "AqtDotGeneral(cfg)"
            )
        check_operands(lhs, rhs)
        cfg = self.cfg and requantization.left_float(self.cfg)
        dot_general = AqtDotGeneral(
            cfg, self.quant_mode, self.frozen_operands, self.name
        )
        out = contract(
            eqn,
            lhs,
            rhs,
            functools.partial(dot_general, precision=precision),
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
            key=key,
        )
        # The axes of the result are those of the equation.
        name = self.name or f"einsum_{_NO_LETTER.sub('_', eqn)}"
        return quantize_output(self, out, name)
