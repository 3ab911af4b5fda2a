"""The quantized `dot_general` to inject into Flax Linen layers.

Before: `contraction/differentiation.py`, the contraction that it calls.
Next: `program/program.py`, a whole model and its weights.
"""

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
from flax.core import Scope

from aqtlite import config, errors, operations
from aqtlite.contraction import contract as contraction
from aqtlite.contraction import requantization
from aqtlite.contraction.contract import Options, contract
from aqtlite.flax.injectable import injectable
from aqtlite.flax.linen import caller as callers
from aqtlite.flax.linen import statistics
from aqtlite.flax.linen.bare import lookup, recording
from aqtlite.flax.linen.bare.module_variables import module_variables
from aqtlite.flax.linen.caller import Caller, find_caller, path_of
from aqtlite.operations import Operation
from aqtlite.program import injected
from aqtlite.program.serving import guards
from aqtlite.program.serving.contraction import Contraction
from aqtlite.program.serving.frozen_record import COLLECTION
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization.states.statistics import States


class QuantMode(enum.Enum):
    """A mode to enforce; without one, the variables decide."""

    TRAIN = "train"
    """Quantize both operands at every call, and refuse frozen kernels."""

    SERVE = "serve"
    """Use frozen weights, and raise if there are none.

    `init` still returns float variables, for `convert`. The shapes of the serving
    variables are ``jax.eval_shape(lambda v: convert(model, v, *args), variables)``.
    """


FrozenOperands = Literal["auto", "lhs", "rhs", "both", "none"]

_MODULE_METHODS = ("apply", "init", "init_with_output", "lazy_init", "bind")


@dataclasses.dataclass(frozen=True)
class Injected:
    """Base of quantized contractions for Flax modules, with their fields."""

    cfg: config.DotGeneral | None
    """Config of the quantization; None contracts exactly as `jax.lax` does."""

    quant_mode: QuantMode | None = None
    """Mode to enforce. None: the variables decide."""

    frozen_operands: FrozenOperands = "auto"
    """Operands that `convert` freezes. "auto": an operand that depends only on
    parameters and constants, at most one per contraction, and none that may have been
    broadcast to a batch. "lhs" is an einsum's first operand."""

    name: str | None = None
    """Name for the frozen weights and states; None for the names of the parameters and
    of the operation."""

    def __post_init__(self):
        cls = type(self).__name__
        if self.cfg is not None and not isinstance(self.cfg, config.DotGeneral):
            is_text = isinstance(self.cfg, str)
            raise TypeError(
                f"{cls} takes a config.DotGeneral or None, got "
                f"{errors.brief(self.cfg)}; presets such as "
                "config.fully_quantized() make one"
                + (". An equation goes to AqtEinsum(cfg)(equation, lhs, rhs)" * is_text)
            )
        if not isinstance(self.quant_mode, QuantMode | None):
            raise ValueError(
                f"{cls}.quant_mode must be a QuantMode or None, got {self.quant_mode!r}"
            )
        if self.frozen_operands not in ("auto", "lhs", "rhs", "both", "none"):
            raise ValueError(
                f"{cls}.frozen_operands must be 'auto', 'lhs', 'rhs', 'both' or "
                f"'none', got {self.frozen_operands!r}"
            )

    def __getattr__(self, name: str) -> Any:
        # Called for missing attributes: nnx.bridge.ToNNX takes anything for a module.
        cls = type(self).__name__
        why = ""
        if name in _MODULE_METHODS:
            why = (
                f": it is a function to inject, such as Dense(dot_general={cls}(cfg)), "
                "and not a Flax module. Wrap the layer, not the function"
            )
        raise AttributeError(f"{cls!r} object has no attribute {name!r}{why}")

    def run(
        self,
        operation: Operation,
        lhs: Any,
        rhs: Any,
        options: Options,
        out_name: str | None = None,
        number: int = 0,
    ) -> jax.Array | QTensor:
        """Runs a call: for training or serving, or recorded by a conversion.

        Args:
            operation: the contraction.
            lhs: array or `QTensor`.
            rhs: array or `QTensor`.
            options: other arguments, without states. Without a key, stochastic rounding
                is seeded from the rng stream "aqt".
            out_name: name of the statistics of the result; None for the operation's.
            number: number of the contraction in a call of several ones.
        """
        caller = find_caller()
        cfg = self.cfg or config.unquantized()
        if cfg.needs_noise and self._is_for_serving(caller):
            cfg = cfg.for_serving()
        call = Contraction(
            cfg=cfg.with_float_out(),
            frozen_operands=self.frozen_operands,
            name=f"{self.name}_{number}" if self.name and number else self.name,
            operation=operation,
            lhs=lhs,
            rhs=rhs,
        )
        scope = caller.variables
        has_states = call.cfg.has_states and not call.is_product
        entry = statistics.entry_of(call, scope, number) if has_states else None
        if entry is not None:
            call = dataclasses.replace(call, states=statistics.read(call, entry))
            statistics.note_uses(call, entry, is_noisy=self._is_noisy)
        call, operands = self._prepare(call, caller)
        cfg, states = call.cfg, call.states
        if options.key is None and cfg.needs_noise and scope is not None:
            options = options._replace(key=_rng(scope))
        if entry is not None:
            states = statistics.update(call, operands, entry)
        run: Callable[..., Any] = contract
        if callers.is_in_float():
            if cfg.is_quantized and injected.is_marking() and not call.is_product:
                run = functools.partial(injected.marked, injected.Described)
            else:
                cfg, states = config.unquantized(), States()
        options = options._replace(states=states)
        run = functools.partial(run, cfg, operation, options=options)
        if any(isinstance(x, lookup.Either) for x in operands):
            run = functools.partial(lookup.contract, run)
        naming: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if scope is not None:
            naming = errors.naming(path_of(scope))
        with naming:
            result: Any = run(*operands)
        # Outside of the branches of `lookup.contract`, so that it happens once.
        out_name = self.name or out_name or operation.name
        return self._quantize_output(result, scope, out_name)

    def _prepare(
        self, call: Contraction, caller: Caller
    ) -> tuple[Contraction, tuple[Any, Any]]:
        """Records a call or looks up its frozen weights; also returns its operands."""
        if recording.is_recorded() and self.quant_mode is not QuantMode.TRAIN:
            call = recording.record(call, caller)
            return call, (call.lhs, call.rhs)
        return call, self._operands(call, caller)

    def _quantize_output(
        self, out: jax.Array, scope: Scope | None, name: str
    ) -> jax.Array | QTensor:
        """Quantizes a result, with the statistics that its module keeps by `name`."""
        if self.cfg is None or not self.cfg.out.is_quantized:
            return out
        tensor, state = self.cfg.out, ()
        if tensor.calibration.has_state:
            own = self.name is not None
            state = statistics.of_output(tensor, out, scope, name, own=own)
        if callers.is_in_float():
            return out
        return requantization.quantize(out, tensor, state)

    @property
    def _is_noisy(self) -> bool:
        """Whether forward operands are rounded stochastically in training."""
        if self.cfg is None:
            return False
        return self.cfg.fwd.lhs.needs_noise or self.cfg.fwd.rhs.needs_noise

    def _is_for_serving(self, caller: Caller) -> bool:
        """Whether forward operands are rounded to nearest, as in serving."""
        if self.quant_mode is not None:
            return self.quant_mode is QuantMode.SERVE
        return recording.is_recorded() or caller.serves

    def _operands(self, call: Contraction, caller: Caller) -> tuple[Any, Any]:
        """Returns the operands to contract, with frozen weights in place of floats."""
        scope = caller.variables
        if scope is not None and caller.has_serving_variables:
            why = self._why_not_served(call, scope)
            if why is None:
                return lookup.frozen_operands(call, module_variables(scope))
            lookup.check_no_frozen_parameter(module_variables(scope), call, why)
        if self.quant_mode is QuantMode.SERVE and call.cfg.is_quantized:
            self._check_serves(scope)
        return call.lhs, call.rhs

    def _why_not_served(self, call: Contraction, scope: Scope) -> str | None:
        """Returns why a call takes no frozen weights, or None if it does."""
        if not call.cfg.is_quantized:
            return "this contraction has no quantization"
        if self.quant_mode is QuantMode.TRAIN:
            return "quant_mode is QuantMode.TRAIN"
        if self.frozen_operands == "none":
            return "frozen_operands is 'none'"
        if scope.root.is_collection_empty(COLLECTION):
            return f"the variables have no collection '{COLLECTION}'"
        return None

    def _check_serves(self, scope: Scope | None) -> None:
        """Raises ValueError if `QuantMode.SERVE` can find no frozen weights here."""
        if scope is None:
            raise ValueError(
                "AqtDotGeneral(quant_mode=QuantMode.SERVE) was called outside a "
                "Flax module or inside a transformation such as jax.jit within "
                "one, where there are no frozen weights"
            )
        is_empty = scope.root.is_collection_empty(COLLECTION)
        may_be = self.frozen_operands == "none" or scope.get_flag("initializing", False)
        if is_empty and not may_be:
            raise ValueError(
                f"{path_of(scope)} has quant_mode=QuantMode.SERVE, but the "
                f"variables have no collection '{COLLECTION}'; convert them first"
            )


@injectable
@dataclasses.dataclass(frozen=True)
class AqtDotGeneral(Injected):
    """A quantized `dot_general` for Flax Linen layers and modules.

    Pass it as `dot_general=` of a layer, or as
    ``functools.partial(AqtDotGeneral, cfg)`` for `dot_general_cls=`. It is not a
    module: it has no variables of its own, compares by value, and one instance may be
    shared by any number of layers. The weights that `convert` freezes are in the
    collection "aqt" under the path of the calling module.

    The variables of the model decide how a call runs:

    - inside `convert`, it records its quantized operands;
    - if an operand is made of parameters that `convert` froze, it contracts the frozen
      weight;
    - otherwise it quantizes both operands and can be differentiated (training).

    Statistics of calibrations are in the collection "aqt_stats": `init` creates it,
    ``apply(..., mutable=["aqt_stats"])`` updates it, and `apply` alone reads it.
    Statistics of output gradients are in "_overwrite_with_gradient", to be replaced by
    their own gradient. Learned parameters are in "params".

    Stochastic rounding is seeded from the rng stream "aqt" if there is one, and
    otherwise from the bounds that calibration finds, so that no stream is needed. With
    variables from `convert`, forward operands, weights and activations alike, are
    rounded to nearest whatever the config says.

    >>> import flax.linen as nn, jax.numpy as jnp
    >>> dense = nn.Dense(4, dot_general=AqtDotGeneral(config.fully_quantized()))
    >>> variables = dense.init(jax.random.key(0), jnp.ones((2, 3)))
    >>> dense.apply(variables, jnp.ones((2, 3))).shape
    (2, 4)

    Raises:
        TypeError: if `cfg` is neither a `config.DotGeneral` nor None.
        ValueError: if another field has an invalid value.
    """

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
    ) -> jax.Array | QTensor:
        """Contracts like `jax.lax.dot_general`; see `aqtlite.make_dot_general`."""
        lhs, rhs = as_operands(lhs, rhs)
        operation = operations.DotGeneral.of(dimension_numbers, lhs.shape, rhs.shape)
        options = Options(precision, preferred_element_type, out_sharding, key)
        return self.run(operation, lhs, rhs, options)


def as_operands(lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """Returns operands as arrays or `QTensor`s.

    Raises:
        TypeError: if an operand is None or no array.
    """
    for side, x in (("lhs", lhs), ("rhs", rhs)):
        check_restored(x, side)
    return contraction.as_operands(lhs, rhs)


def check_restored(x: Any, name: str) -> None:
    """Raises TypeError for an operand that is None, or a mapping in place of an array.

    Args:
        x: the operand.
        name: "lhs", "rhs", or the number of an operand of an einsum.
    """
    if x is None or isinstance(x, Mapping):
        what = f"the {name}" if name in operations.SIDES else f"operand {name}"
        raise TypeError(f"{what} is {errors.brief(x)}: {guards.RESTORED}")


def _rng(scope: Scope) -> jax.Array | None:
    """Returns a key from the rng stream "aqt", or None without one."""
    return scope.make_rng(COLLECTION) if scope.has_rng(COLLECTION) else None
