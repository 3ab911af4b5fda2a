"""The quantized einsum for Flax modules."""

import dataclasses
import re
from typing import Any

import jax

from aqtlite.contraction import einsum_path
from aqtlite.contraction.contract import Options
from aqtlite.contraction.einsum import as_dot_general, as_operands
from aqtlite.contraction.einsum_path import Step
from aqtlite.flax import attention
from aqtlite.flax.injectable import check_equation, injectable
from aqtlite.flax.linen.dot_general import Injected, check_restored
from aqtlite.operations import SIDES
from aqtlite.qtensor.qtensor import QTensor

_NO_LETTER = re.compile("[^a-zA-Z]+")


@injectable
@dataclasses.dataclass(frozen=True)
class AqtEinsum(Injected):
    """A quantized einsum for Flax modules, based on `AqtDotGeneral`.

    Call it in a module, or pass it as `qk_attn_weights_einsum=` and
    `attn_weights_value_einsum=` of `nn.dot_product_attention`, whose values then have a
    scale for each position (`config.for_values`). Its fields are those of
    `AqtDotGeneral`.

    >>> import jax.numpy as jnp
    >>> from aqtlite import config
    >>> einsum = AqtEinsum(config.fully_quantized())
    >>> einsum("bk,kn->bn", jnp.ones((2, 3)), jnp.ones((3, 4))).shape
    (2, 4)
    """

    def __call__(
        self,
        eqn: str,
        *operands: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
        key: jax.Array | None = None,
    ) -> jax.Array | QTensor:
        """Evaluates the equation like `jnp.einsum`; see `aqtlite.einsum`.

        Of three and more operands, states of the contractions behind the first one have
        a number after their name (``aqt_stats/dot_general_ab_bc_1``).
        """
        check_equation(eqn)
        for number, x in enumerate(operands):
            check_restored(x, SIDES[number] if len(operands) == 2 else str(number))
        arrays = as_operands(operands)
        steps = einsum_path.steps_of(eqn, arrays)
        # Named after the equation, which also has the order of the result's axes.
        name = f"einsum_{_NO_LETTER.sub('_', eqn)}"

        def run(number: int, step: Step, lhs: Any, rhs: Any) -> jax.Array | QTensor:
            lhs, rhs, operation, order = as_dot_general(step.equation, lhs, rhs)
            options = Options(
                precision,
                preferred_element_type,
                out_sharding if step.is_last else None,
                einsum_path.key_of_step(key, number),
                order=order,
            )
            given = step.config_of(self.cfg)
            cfg = attention.config_of(given, step.equation)
            own = self if cfg is self.cfg else dataclasses.replace(self, cfg=cfg)
            with attention.noted(given, step.equation):
                return own.run(operation, lhs, rhs, options, name, number)

        return einsum_path.contracted(steps, arrays, run)
