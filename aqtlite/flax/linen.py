"""The functions to inject into Flax Linen layers."""

import dataclasses
import functools
from typing import Any, Literal

import jax
from flax import linen as nn
from flax.core import Scope

from aqtlite import config, dot_general
from aqtlite import dimension_numbers as dn
from aqtlite.einsum import contract
from aqtlite.flax import site
from aqtlite.flax.mode import QuantMode
from aqtlite.qtensor import QTensor

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
    - where the variables hold frozen weights, it contracts those;
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
    but parameters and constants."""

    name: str | None = None
    """The name of the frozen weights' scope. Wanted where one object is called for
    several weights in a method that is not `@nn.compact`."""

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
        return self.call_for(
            self,
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            out_sharding=out_sharding,
            key=key,
        )

    def call_for(
        self,
        owner: Any,
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """The call, on behalf of the object that a module holds and has called."""
        dot = dot_general.make_dot_general(self.cfg)
        cfg = self.cfg
        scope = site.find_scope(owner, self.name)
        if cfg is None or not cfg.is_quantized:
            site.check_no_frozen_kernel(scope, "this contraction has no quantization")
        elif scope is not None:
            lhs, rhs = self._frozen_or_recorded(cfg, scope, lhs, rhs, dimension_numbers)
            needs_noise = cfg.dlhs.lhs.needs_noise or cfg.drhs.lhs.needs_noise
            if key is None and needs_noise and scope.has_rng(site.COLLECTION):
                key = scope.make_rng(site.COLLECTION)
        elif self.quant_mode is QuantMode.SERVE:
            raise ValueError(
                "AqtDotGeneral(quant_mode=QuantMode.SERVE) was called outside a Flax "
                "module or inside a transformation such as jax.jit within one, where "
                "there are no frozen weights"
            )
        return dot(
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            out_sharding=out_sharding,
            key=key,
        )

    def _frozen_or_recorded(
        self,
        cfg: config.DotGeneral,
        scope: Scope,
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
    ) -> tuple[Any, Any]:
        """The operands, frozen ones in place of those that are."""
        mode = self.quant_mode
        if mode is QuantMode.TRAIN:
            site.check_no_frozen_kernel(scope, "quant_mode is QuantMode.TRAIN")
            return lhs, rhs
        dims = dn.canonicalize(dimension_numbers, lhs.shape, rhs.shape)
        here = site.Site(
            cfg=cfg,
            dimension_numbers=dims,
            shapes=(lhs.shape, rhs.shape),
            frozen=(),
        )
        if site.is_converting():
            self._record(scope, here, lhs, rhs)
            return lhs, rhs
        if self.frozen_operands == "none":
            site.check_no_frozen_kernel(scope, "frozen_operands is 'none'")
            return lhs, rhs
        if not scope.is_collection_empty(site.COLLECTION):
            return _frozen(scope, here, lhs, rhs)
        site.check_no_frozen_kernel(
            scope, f"the variables have no collection '{site.COLLECTION}'"
        )
        if mode is QuantMode.SERVE:
            raise ValueError(
                f"{scope.path_text} has quant_mode=QuantMode.SERVE, but the variables "
                f"have no collection '{site.COLLECTION}'; convert them first"
            )
        return lhs, rhs

    def _record(self, scope: Scope, here: site.Site, lhs: Any, rhs: Any) -> None:
        sides = {"auto": ("lhs", "rhs"), "both": ("lhs", "rhs"), "none": ()}.get(
            self.frozen_operands, (self.frozen_operands,)
        )
        if not sides:
            return
        if not scope.is_mutable_collection(site.COLLECTION):
            raise ValueError(
                f"the frozen weights of {scope.path_text or '/'} cannot leave the "
                "transformation around it, which does not lift the collection "
                f"'{site.COLLECTION}'. Where it is nn.scan or nn.vmap, name it beside "
                f"'params': variable_axes={{'params': 0, '{site.COLLECTION}': 0}}. "
                "Where it is another (nn.map_variables, nn.WeightNorm), leave this "
                "contraction to be quantized at every call, with "
                "AqtDotGeneral(..., frozen_operands='none')"
            )
        lhs_q, rhs_q = dot_general.quantize_operands(
            here.cfg, lhs, rhs, here.dimension_numbers
        )
        wanted: dict[str, Any] = {}
        required: tuple[str, ...] = ()
        for side, x, qtensor in (("lhs", lhs, lhs_q), ("rhs", rhs, rhs_q)):
            if side in sides and qtensor is not None:
                order = here.serving_order(side, qtensor.ndim)
                wanted[side] = qtensor.stored_in(order)
                wanted[site.ORIGINAL + side] = x
                required += () if self.frozen_operands == "auto" else (side,)
        here = dataclasses.replace(here, frozen=required)
        # A module that is called twice records twice; `convert` compares.
        repeat = 0
        while scope.has_variable(site.COLLECTION, _repeated("site", repeat)):
            repeat += 1
        scope.put_variable(site.COLLECTION, _repeated("site", repeat), here)
        for name, value in wanted.items():
            scope.put_variable(site.COLLECTION, _repeated(name, repeat), value)


def _repeated(name: str, repeat: int) -> str:
    return name if repeat == 0 else f"{name}#{repeat}"


def _frozen(scope: Scope, here: site.Site, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """The operands for serving, checked against what was converted."""
    where = scope.path_text or "/"
    stored = scope.get_variable(site.COLLECTION, "site")
    if not isinstance(stored, site.Site):
        found = "nothing" if stored is None else f"a {type(stored).__name__}"
        raise ValueError(
            f"the variables hold frozen weights, but {found} for {where}: they come "
            "from another model, from another method of it, or were restored from a "
            "checkpoint without a target. Convert this model, or restore with "
            "jax.eval_shape(lambda v: convert(model, v, *args), variables) as target"
        )
    if stored.cfg != here.cfg:
        changes = "; ".join(config.differences(stored.cfg, here.cfg))
        raise ValueError(
            f"the frozen weights of {where} were converted with another config than "
            f"they are called with: {changes}"
        )
    site.check_removed(scope, stored)
    operands = {"lhs": lhs, "rhs": rhs}
    for index, side in enumerate(("lhs", "rhs")):
        if side not in stored.frozen:
            continue
        if stored.contracting(side) != here.contracting(side):
            raise ValueError(
                f"the frozen {side} of {where} was converted for dimension_numbers "
                f"{stored.dimension_numbers}, and is called with "
                f"{here.dimension_numbers}, which contract other axes of it"
            )
        qtensor = nn.meta.unbox(scope.get_variable(site.COLLECTION, side))
        if not isinstance(qtensor, QTensor):
            raise ValueError(
                f"the frozen {side} of {where}, of shape {stored.shapes[index]}, is "
                f"missing from the collection '{site.COLLECTION}'; convert again"
            )
        if qtensor.shape != operands[side].shape:
            raise ValueError(
                f"the frozen {side} of {where} has shape {qtensor.shape}, but the call "
                f"has a {side} of shape {operands[side].shape}. If its shape follows "
                "the inputs', do not freeze it: AqtDotGeneral(..., frozen_operands=...)"
            )
        scale = _without_gradient(where, qtensor.scale, operands[side])
        operands[side] = dataclasses.replace(qtensor, scale=scale)
    return operands["lhs"], operands["rhs"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _without_gradient(where: str, scale: jax.Array, operand: jax.Array) -> jax.Array:
    """The scale; raises if the float operand that was frozen is differentiated."""
    del where, operand
    return scale


def _without_gradient_fwd(where: str, scale: Any, operand: Any):
    if operand.perturbed:
        raise TypeError(
            f"a gradient was asked with respect to parameters that are frozen in "
            f"{where}: serving variables are not for training. Train on the float "
            "variables and convert them again"
        )
    return scale.value, None


def _without_gradient_bwd(where: str, residuals: None, g: Any):
    del where, residuals
    return g, None


_without_gradient.defvjp(
    _without_gradient_fwd, _without_gradient_bwd, symbolic_zeros=True
)


@dataclasses.dataclass(frozen=True)
class AqtEinsum:
    """A quantized einsum for Flax modules: `AqtDotGeneral` behind an equation.

    It also goes where Flax takes `einsum=`, as in `nn.dot_product_attention`.

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
            functools.partial(self._dot_general().call_for, self, precision=precision),
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
            key=key,
        )
