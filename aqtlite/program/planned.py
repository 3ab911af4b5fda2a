"""A planned contraction of a program, and its evaluation."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax

from aqtlite import config, errors, operations
from aqtlite.config import DotGeneral, arithmetic, of_activations
from aqtlite.contraction import contract as contraction
from aqtlite.contraction import ragged_dot
from aqtlite.jaxpr.origins import Origin
from aqtlite.jaxpr.sites import Site
from aqtlite.operations import SIDES, Operation, Side
from aqtlite.program.adapters import low_rank
from aqtlite.program.gradient_rules.recognized import Again, Gradient
from aqtlite.program.planned_operand import PlannedOperand
from aqtlite.program.planned_operation import NO_STATES, PlannedOperation
from aqtlite.quantization import granularity
from aqtlite.quantization.preparation import rotation, sparsity
from aqtlite.quantization.states.state_collections import (
    ADAPTER,
    PARAMETERS,
    collections_of,
)
from aqtlite.quantization.states.statistics import States


@dataclasses.dataclass(frozen=True)
class PlannedContraction(PlannedOperation):
    """A contraction of a program, and the decision about it."""

    path: str
    """Path that rules match, with ``#`` and a number from the second one on."""

    module: str
    """Path of the module of Flax that contracts, in its model; of other functions, the
    name scopes but for the equations of einsums."""

    kept_under: str
    """Name under which its frozen weights are kept."""

    kept_as: str
    """Name under which its calibration states are kept; no other contraction has it."""

    op: str
    """Function of `jax.lax` that contracts."""

    registered: str | None
    """Name of the registered kernel or function that contains it
    (`register_operation`), if any."""

    equation: str | None
    """Axes of a `dot_general` as an einsum equation; None for other operations."""

    lhs: PlannedOperand
    rhs: PlannedOperand
    rule: int | None
    """Index of the first rule that matches it; None if none does."""

    cfg: config.DotGeneral
    """Config that quantizes it; `config.unquantized()` if it stays in float."""

    why_float: str | None
    """Reason why it stays in float; None if it is quantized."""

    why_not_smoothed: str | None
    """Reason why the rule's smoothing is left out; None if it is not."""

    is_left_alone: bool = dataclasses.field(default=False, kw_only=True)
    """Whether it stays in float because there is nothing to quantize: nothing is
    summed, or the rule's config quantizes weights and it has none."""

    parameters: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)
    """Paths of the parameters that its weights are made of."""

    adapter: config.Lora | None = dataclasses.field(default=None, kw_only=True)
    """Adapter of its weight, which is frozen; None for none."""

    is_injected: bool
    """Whether the config comes from an injected function, before any rules."""

    site: Site = dataclasses.field(repr=False, compare=False)

    rule_of_gradient: str | None = dataclasses.field(default=None, kw_only=True)
    """What gives its gradients in place of its config: "jax.custom_vjp" or
    "jax.custom_jvp" of the function around it. None: nothing does."""

    why_gradients_float: str | None = dataclasses.field(default=None, kw_only=True)
    """Reason why the gradients that this rule gives stay in float, if any."""

    gradients: tuple[Gradient, ...] = dataclasses.field(
        default=(), kw_only=True, repr=False, compare=False
    )
    """Contractions in that rule that are recognized as its gradients."""

    again: tuple[Again, ...] = dataclasses.field(
        default=(), kw_only=True, repr=False, compare=False
    )
    """Contractions in that rule that are recognized as this one, computed again."""

    contracted_in: str | None = None
    """Platform and dtypes of its products there, as ``"cuda: int8 x int8"``, with those
    of its gradients if they differ. None in a plan for no platform."""

    @property
    def description(self) -> str:
        """Its equation or operation, after the name of the registered kernel if any."""
        what = self.equation or self.op
        return what if self.registered is None else f"{self.registered}: {what}"

    @property
    def is_quantized(self) -> bool:
        """Whether it is quantized."""
        return self.why_float is None

    @property
    def is_replaced(self) -> bool:
        """Whether it is quantized, or has an adapter."""
        return self.is_quantized or self.adapter is not None

    @property
    def collections(self) -> Mapping[str, list[str]]:
        """For each collection that it uses, the fields of `States`."""
        found = dict(collections_of(self.cfg))
        if self.adapter is not None:
            found[PARAMETERS] = [*found.get(PARAMETERS, []), ADAPTER]
        return found

    @property
    def reads_weight(self) -> bool:
        """Whether an operand is a weight."""
        return "weight" in (self.lhs.kind, self.rhs.kind)

    @property
    def is_of_activations(self) -> bool:
        return self.lhs.kind == self.rhs.kind == "activation"

    @property
    def size(self) -> float:
        """Number of elements of the smaller operand.

        An operand of symbolic size (`jax.export`) counts as infinitely large.
        """
        sizes = (math.prod(one.shape) for one in (self.lhs, self.rhs))
        return min((size for size in sizes if isinstance(size, int)), default=math.inf)

    @property
    def is_exchanged(self) -> bool:
        """Whether its weight is the lhs, and is exchanged to be the config's rhs."""
        if self.is_injected:
            return False
        is_weight = self.lhs.kind == "weight" and self.rhs.kind != "weight"
        return self.op == "dot_general" and is_weight

    @property
    def is_pointwise(self) -> bool:
        """Whether it is a convolution that looks at one position, a matrix product.

        It runs as one, in which each position has a scale of its own.
        """
        if self.op != "conv_general_dilated":
            return False
        params, shape = self.site.eqn.params, self.site.eqn.invars[1].aval.shape
        spec = params["dimension_numbers"]
        steps = *params["window_strides"], *params["lhs_dilation"]
        return (
            all(shape[axis] == 1 for axis in spec.rhs_spec[2:])
            and all(step == 1 for step in steps)
            and all(pads == (0, 0) for pads in params["padding"])
            and params["feature_group_count"] == params["batch_group_count"] == 1
        )

    def in_order(self, values: Sequence[Any]) -> list[Any]:
        """Returns its inputs in the order of the config: a single weight second.

        Called twice, it returns those of the equation.
        """
        lhs, rhs, *rest = values
        return [rhs, lhs, *rest] if self.is_exchanged else [lhs, rhs, *rest]

    @property
    def origins(self) -> dict[Side, Origin]:
        """Origins of the operands, by side of the config."""
        lhs, rhs = self.in_order(self.site.operands)
        return {"lhs": lhs, "rhs": rhs}

    def index(self, side: Side) -> int:
        """Returns the index, among its equation's inputs, of a side of the config."""
        return int((side == "rhs") != self.is_exchanged)

    def operation(self, values: Sequence[Any]) -> Operation:
        """Returns its operation, for operands in the order of the config.

        Args:
            values: the inputs of its equation, or their types.
        """
        lhs, rhs, *rest = self.in_order(values)
        params = self.site.eqn.params
        if self.op == "dot_general":
            dims = params["dimension_numbers"]
            if self.is_exchanged:
                dims = tuple((second, first) for first, second in dims)
            return operations.DotGeneral.of(dims, lhs.shape, rhs.shape)
        if self.is_pointwise:
            spec = params["dimension_numbers"]
            dims = ((spec.lhs_spec[1],), (spec.rhs_spec[1],)), ((), ())
            return operations.DotGeneral.of(dims, lhs.shape, rhs.shape)
        if self.op == "conv_general_dilated":
            geometry = (params[name] for name in _GEOMETRY)
            return operations.ConvGeneralDilated.of(lhs.shape, rhs.shape, *geometry)
        return ragged_dot.ragged_operation(lhs, rhs, rest[0])

    @property
    def operation_name(self) -> str:
        """Name of its operation, under which its states are kept."""
        if self.op == "ragged_dot":
            return self.op
        return self.operation([atom.aval for atom in self.site.eqn.invars]).name

    @property
    def mixed_channels(self) -> int | None:
        """Number of channels that its rotation mixes; None without a rotation.

        Raises:
            ValueError: if it has no rotation of such a size.
        """
        how = self.cfg.fwd.rotation
        if how is None:
            return None
        operation, lhs, rhs = self.types()
        with errors.naming(self.path):
            return rotation.order_of(how, operation, lhs.shape, rhs.shape, "fwd")

    def shared_by(self, side: Side) -> str | None:
        """Returns what shares a scale of an activation that its result keeps apart.

        Args:
            side: side of the config.

        Returns:
            "positions and examples", "positions", or None: then no result depends on
            anything, through this scale, that it does not depend on in float.
        """
        tensor = self.cfg.fwd.lhs if side == "lhs" else self.cfg.fwd.rhs
        index = self.index(side)
        is_activation = (self.lhs, self.rhs)[index].kind == "activation"
        if not is_activation:
            return None
        smoothing = self.cfg.fwd.smoothing
        if side == "lhs" and smoothing is not None and smoothing.sees_rows:
            return "positions and examples"
        if not of_activations.is_found(tensor):
            return None
        if tensor.scale_shared_axes == "per_tensor":
            return "positions and examples"
        operation, *shapes = self.types()
        axes = operation.axes(side)
        shape = shapes[SIDES.index(side)].shape
        shared = granularity.layout(tensor, shape, axes, f"fwd.{side}").shared
        if set(shared) - set(axes.contracting) and not tensor.scale_moves:
            return "positions and examples"
        is_window = self.op == "conv_general_dilated" and not self.is_pointwise
        return "positions" if is_window else None

    @property
    def prunes(self) -> bool:
        """Whether its sparsity prunes anything."""
        tensor = self.cfg.fwd.rhs
        if tensor.sparsity is None:
            return False
        operation, _, rhs = self.types()
        return sparsity.of(tensor, rhs.shape, operation.axes("rhs")) is not None

    def check_has_sizes(self, purpose: str) -> None:
        """Raises ValueError if a shape is symbolic, where `purpose` needs sizes."""
        if not all(isinstance(n, int) for n in (*self.lhs.shape, *self.rhs.shape)):
            raise ValueError(
                f"the contraction {errors.quoted(self.path)} has a symbolic shape, "
                f"{self.lhs} by {self.rhs}: plan a call with the sizes to {purpose}"
            )

    def types(self) -> tuple[Operation, Any, Any]:
        """Returns its operation, and the types of both sides of the config."""
        avals = [atom.aval for atom in self.site.eqn.invars]
        lhs, rhs, *rest = self.in_order(avals)
        if self.op == "ragged_dot":
            return operations.RaggedDot(rest[0], lhs.shape[0]), lhs, rhs
        return self.operation(avals), lhs, rhs

    def contract(
        self, cfg: DotGeneral, operands: Sequence[Any], states: States
    ) -> list[jax.Array]:
        """Evaluates it quantized, with its adapter.

        Args:
            cfg: the config.
            operands: result of `in_order`; the first two may be `QTensor`s.
            states: states of the calibrations, and parameters of the adapter.
        """
        if self.adapter is None:
            return self._contracted(cfg, operands, states)
        return low_rank.beside(
            self, lambda fixed: self._contracted(cfg, fixed, states), operands, states
        )

    def _contracted(
        self, cfg: DotGeneral, operands: Sequence[Any], states: States
    ) -> list[jax.Array]:
        if not self.is_quantized:
            return self.bound(self.in_order(operands))
        lhs, rhs, *_ = operands
        eqn, operation = self.site.eqn, self.operation(self.in_order(operands))
        takes_precision = operation.takes_precision and arithmetic.contracts_floats(cfg)
        options = contraction.Options(
            precision=eqn.params["precision"] if takes_precision else None,
            preferred_element_type=eqn.outvars[0].aval.dtype,
            out_sharding=eqn.params["out_sharding"],
            key=states.seed,
            states=states._replace(adapter=(), seed=None),
            order=self.order(lhs.ndim),
        )
        out = cast(jax.Array, contraction.contract(cfg, operation, lhs, rhs, options))
        if self.is_pointwise:
            out = out.reshape(eqn.outvars[0].aval.shape)
        return [out]  # Rules quantize no results.

    def order(self, lhs_ndim: int) -> tuple[int, ...] | None:
        """Returns the permutation of the result's axes; None for none.

        In an exchanged contraction, it moves the remaining axes of the first operand
        behind those of the second; in a pointwise convolution, the window to the end.
        """
        eqn = self.site.eqn
        if self.is_pointwise:
            return _order_of_pointwise(eqn.params["dimension_numbers"])
        if not self.is_exchanged:
            return None
        (_, rhs_ca), (batch, _) = eqn.params["dimension_numbers"]
        start, end = len(batch), lhs_ndim - len(rhs_ca)
        ndim = len(eqn.outvars[0].aval.shape)
        return (*range(start), *range(end, ndim), *range(start, end))

    def in_float(
        self, values: Sequence[Any], states: States = NO_STATES
    ) -> list[jax.Array]:
        """Evaluates it in float; with its adapter, if its parameters are given.

        Args:
            values: the inputs of its equation.
            states: as in `contract`; those of calibrations are not read.
        """
        if self.adapter is None or not states.adapter:
            return self.bound(values)
        return low_rank.beside(
            self,
            lambda fixed: self.bound(self.in_order(fixed)),
            self.in_order(values),
            states,
        )


def _order_of_pointwise(spec: Any) -> tuple[int, ...]:
    """The axes of a convolution's result among those of the matrix product.

    The product has the axes of the input but its features, then those of the kernel but
    these, whose window has size 1.
    """
    inputs = [axis for axis in range(len(spec.lhs_spec)) if axis != spec.lhs_spec[1]]
    kernel = [axis for axis in range(len(spec.rhs_spec)) if axis != spec.rhs_spec[1]]
    made: list[int] = [0] * len(spec.out_spec)
    for number, (axis, of_lhs) in enumerate(
        zip(spec.out_spec, spec.lhs_spec, strict=True)
    ):
        is_feature = number == 1
        made[axis] = (
            len(inputs) + kernel.index(spec.rhs_spec[0])
            if is_feature
            else inputs.index(of_lhs)
        )
    window = (len(inputs) + kernel.index(axis) for axis in spec.rhs_spec[2:])
    return (*made, *window)


_GEOMETRY = (
    "window_strides",
    "padding",
    "lhs_dilation",
    "rhs_dilation",
    "dimension_numbers",
    "feature_group_count",
    "batch_group_count",
)
