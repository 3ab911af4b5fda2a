"""The functions to inject into Flax Linen layers."""

import dataclasses
import functools
from typing import Any, Literal

import jax
from flax.core import Scope

from aqtlite import config, dot_general
from aqtlite import dimension_numbers as dn
from aqtlite.einsum import contract
from aqtlite.flax import observing, serving, site
from aqtlite.flax.mode import QuantMode
from aqtlite.flax.observing import Contraction

FrozenOperands = Literal["auto", "lhs", "rhs", "both", "none"]


@dataclasses.dataclass(frozen=True)
class AqtDotGeneral:
    """A quantized `dot_general` for Flax Linen layers and modules.

    It goes where a layer takes `dot_general=`, and as
    ``functools.partial(AqtDotGeneral, cfg)`` where it takes `dot_general_cls=`. It is
    not a module: it has no variables or names of its own, compares by value, and one
    instance may go into any number of layers. What `convert` freezes lies in the
    collection "aqt" under the path of the module that makes the call.

    What a call does depends on the variables that the model was given:

    - inside `convert`, it records its quantized operands;
    - where an operand is made of what `convert` froze, it contracts the frozen weight;
    - otherwise it quantizes both operands, and differentiates (training).

    Stochastic rounding draws from the rng stream "aqt" if there is one, and otherwise
    from the bits of the gradients, so that no stream is needed.

    >>> import flax.linen as nn, jax.numpy as jnp
    >>> dense = nn.Dense(4, dot_general=AqtDotGeneral(config.fully_quantized()))
    >>> variables = dense.init(jax.random.key(0), jnp.ones((2, 3)))
    >>> dense.apply(variables, jnp.ones((2, 3))).shape
    (2, 4)

    Raises:
        TypeError: if `cfg` is neither a `config.DotGeneral` nor None.
        ValueError: if another field has a value that is not listed.
    """

    cfg: config.DotGeneral | None
    """What to quantize; None is exactly `lax.dot_general`."""

    quant_mode: QuantMode | None = None
    """Imposes a mode. None: the variables decide."""

    frozen_operands: FrozenOperands = "auto"
    """Which operands `convert` freezes. "auto": those whose values depend on nothing
    but parameters and constants, one for a contraction, and none that may have been
    broadcast to a batch."""

    name: str | None = None
    """What to name the frozen weights by, in place of their parameters."""

    def __post_init__(self):
        dot_general.make_dot_general(self.cfg)  # Checks the type.
        if not isinstance(self.quant_mode, QuantMode | None):
            raise ValueError(
                f"AqtDotGeneral.quant_mode must be a QuantMode or None, got "
                f"{self.quant_mode!r}"
            )
        if self.frozen_operands not in ("auto", "lhs", "rhs", "both", "none"):
            raise ValueError(
                "AqtDotGeneral.frozen_operands must be 'auto', 'lhs', 'rhs', 'both' or "
                f"'none', got {self.frozen_operands!r}"
            )

    def __call__(
        self,
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Contracts like `jax.lax.dot_general`; see `aqtlite.make_dot_general`."""
        dot = dot_general.make_dot_general(self.cfg)
        cfg = self.cfg
        caller = site.find_caller()
        scope = caller.scope if caller is not None and caller.is_inside else None
        if cfg is None or not cfg.is_quantized:
            why = "this contraction has no quantization"
            site.check_no_frozen_kernel(scope, (lhs, rhs), why)
        else:
            contraction = Contraction(
                caller=caller,
                cfg=cfg,
                frozen_operands=self.frozen_operands,
                name=self.name,
                dims=dn.canonicalize(dimension_numbers, lhs.shape, rhs.shape),
                lhs=lhs,
                rhs=rhs,
            )
            lhs, rhs = self._operands(contraction, scope)
            needs_noise = cfg.dlhs.lhs.needs_noise or cfg.drhs.lhs.needs_noise
            if key is None and needs_noise and scope is not None:
                key = _rng(scope)

        def contract(lhs: Any, rhs: Any) -> jax.Array:
            return dot(
                lhs,
                rhs,
                dimension_numbers,
                precision,
                preferred_element_type,
                out_sharding=out_sharding,
                key=key,
            )

        return serving.contract(contract, lhs, rhs)

    def _operands(self, call: Contraction, scope: Scope | None) -> tuple[Any, Any]:
        """The operands to contract: frozen weights in place of those that are."""
        mode = self.quant_mode
        plain = call.lhs, call.rhs
        if mode is QuantMode.TRAIN:
            why = "quant_mode is QuantMode.TRAIN"
            site.check_no_frozen_kernel(scope, plain, why)
            return plain
        if observing.is_observed():
            return observing.observe(call)
        if scope is None:
            if mode is QuantMode.SERVE:
                raise ValueError(
                    "AqtDotGeneral(quant_mode=QuantMode.SERVE) was called outside a "
                    "Flax module or inside a transformation such as jax.jit within "
                    "one, where there are no frozen weights"
                )
            return plain
        if self.frozen_operands == "none":
            site.check_no_frozen_kernel(scope, plain, "frozen_operands is 'none'")
            return plain
        if not scope.root.is_collection_empty(site.COLLECTION):
            return serving.frozen_operands(call, scope)
        why = f"the variables have no collection '{site.COLLECTION}'"
        site.check_no_frozen_kernel(scope, plain, why)
        if mode is QuantMode.SERVE and not scope.get_flag("initializing", False):
            raise ValueError(
                f"{site.describe(scope)} has quant_mode=QuantMode.SERVE, but the "
                f"variables have no collection '{site.COLLECTION}'; convert them first"
            )
        return plain


def _rng(scope: Scope) -> jax.Array | None:
    """A key from the stream "aqt", if there is one."""
    return scope.make_rng(site.COLLECTION) if scope.has_rng(site.COLLECTION) else None


@dataclasses.dataclass(frozen=True)
class AqtEinsum:
    """A quantized einsum for Flax modules: `AqtDotGeneral` behind an equation.

    It also goes where Flax takes an einsum: `qk_attn_weights_einsum=` and
    `attn_weights_value_einsum=` of `nn.dot_product_attention`.

    >>> import jax.numpy as jnp
    >>> einsum = AqtEinsum(config.fully_quantized())
    >>> einsum("bk,kn->bn", jnp.ones((2, 3)), jnp.ones((3, 4))).shape
    (2, 4)
    """

    cfg: config.DotGeneral | None
    """What to quantize; None contracts in floating point."""

    quant_mode: QuantMode | None = None
    """As in `AqtDotGeneral`."""

    frozen_operands: FrozenOperands = "auto"
    """As in `AqtDotGeneral`; "lhs" is the equation's first operand."""

    name: str | None = None
    """As in `AqtDotGeneral`."""

    def __post_init__(self):
        self._dot_general()  # Checks the fields.

    def _dot_general(self) -> AqtDotGeneral:
        fields = (self.cfg, self.quant_mode, self.frozen_operands, self.name)
        return AqtDotGeneral(*fields)

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
    ) -> jax.Array:
        """Evaluates the equation like `jnp.einsum`; see `aqtlite.einsum`."""
        return contract(
            eqn,
            lhs,
            rhs,
            functools.partial(self._dot_general(), precision=precision),
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
            key=key,
        )
