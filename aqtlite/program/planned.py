"""A planned contraction of a program, and its evaluation."""

import dataclasses
import math
import string
from collections.abc import Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp

from aqtlite import config, operations
from aqtlite.config import DotGeneral, arithmetic
from aqtlite.contraction import contract as contraction
from aqtlite.contraction import ragged_dot
from aqtlite.jaxpr.sites import Site
from aqtlite.operations import Operation, Side
from aqtlite.quantization.statistics import States
from aqtlite.shapes.sharding import describe

Kind = Literal["weight", "activation", "constant"]


@dataclasses.dataclass(frozen=True)
class PlannedOperand:
    """An operand of a contraction."""

    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    """"weight": depends only on parameters. "constant": depends on no input.
    "activation": any other."""

    def __str__(self) -> str:
        return f"{self.kind} {describe(self)}"


@dataclasses.dataclass(frozen=True)
class PlannedContraction:
    """A contraction of a program, and the decision about it."""

    path: str
    """Path that rules match, with ``#`` and a number from the second one on."""

    module: str
    """Path without the number."""

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

    is_injected: bool
    """Whether the config comes from an injected function, before any rules."""

    site: Site = dataclasses.field(repr=False, compare=False)

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
    def is_exchanged(self) -> bool:
        """Whether its weight is the lhs, and is exchanged to be the config's rhs."""
        if self.is_injected:
            return False
        is_weight = self.lhs.kind == "weight" and self.rhs.kind != "weight"
        return self.op == "dot_general" and is_weight

    def in_order(self, values: Sequence[Any]) -> list[Any]:
        """Returns its inputs in the order of the config: a single weight second."""
        lhs, rhs, *rest = values
        return [rhs, lhs, *rest] if self.is_exchanged else [lhs, rhs, *rest]

    def index(self, side: Side) -> int:
        """Returns the index, among its equation's inputs, of a side of the config."""
        return int((side == "rhs") != self.is_exchanged)

    def operation(self, values: Sequence[Any]) -> Operation:
        """Returns its operation, for operands in the order of the config.

        Args:
            values: the inputs of its equation, or their types.
        """
        return _operation_of(self.site.eqn, values, exchanged=self.is_exchanged)

    @property
    def operation_name(self) -> str:
        """Name of its operation, under which its states are kept."""
        if self.op == "ragged_dot":
            return self.op
        return self.operation([atom.aval for atom in self.site.eqn.invars]).name

    def contract(
        self, cfg: DotGeneral, operands: Sequence[Any], states: States
    ) -> list[jax.Array]:
        """Evaluates it quantized.

        Args:
            cfg: the config.
            operands: result of `in_order`; the first two may be `QTensor`s.
            states: states of the calibrations.
        """
        exchanged = self.is_exchanged
        return [_contract(self.site.eqn, cfg, operands, states, exchanged=exchanged)]

    def in_float(self, values: Sequence[Any]) -> list[jax.Array]:
        """Evaluates it in float.

        Args:
            values: the inputs of its equation.
        """
        cfg = config.unquantized()
        return [_contract(self.site.eqn, cfg, values, States(), exchanged=False)]


def why_not_quantized(eqn: Any) -> str | None:
    """Returns why an equation cannot be quantized, or None if it can.

    Args:
        eqn: equation of one of the primitives in `registry.OF_PRIMITIVES`.
    """
    lhs, rhs = (atom.aval for atom in eqn.invars[:2])
    for aval in (lhs, rhs):
        if not jnp.issubdtype(aval.dtype, jnp.floating):
            return f"it contracts {aval.dtype.name}, and only floats are quantized"
    if 0 in (*lhs.shape, *rhs.shape):
        return "an operand is empty"
    if eqn.primitive.name == "ragged_dot_general":
        dims = eqn.params["ragged_dot_dimension_numbers"]
        found = (
            dims.dot_dimension_numbers,
            tuple(dims.lhs_ragged_dimensions),
            tuple(dims.rhs_group_dimensions),
        )
        if found != ((((1,), (1,)), ((), ())), (0,), (0,)) or (
            eqn.params["group_offset"] is not None
        ):
            return "it is a ragged_dot_general of other axes than lax.ragged_dot's"
    return None


def _operation_of(eqn: Any, values: Sequence[Any], *, exchanged: bool) -> Operation:
    """The operation of an equation.

    Args:
        eqn: the equation.
        values: its inputs.
        exchanged: whether to exchange the operands of a `dot_general`.
    """
    lhs, rhs, *rest = values
    if eqn.primitive.name == "dot_general":
        dims = eqn.params["dimension_numbers"]
        if exchanged:
            lhs, rhs, dims = rhs, lhs, _exchanged(dims)
        return operations.DotGeneral.of(dims, lhs.shape, rhs.shape)
    if eqn.primitive.name == "conv_general_dilated":
        return operations.ConvGeneralDilated.of(
            lhs.shape, rhs.shape, *_geometry(eqn.params)
        )
    return ragged_dot.ragged_operation(lhs, rhs, rest[0])


def _contract(
    eqn: Any,
    cfg: DotGeneral,
    values: Sequence[Any],
    states: States,
    *,
    exchanged: bool,
) -> jax.Array:
    """Evaluates an equation as a quantized contraction.

    Args:
        eqn: the equation.
        cfg: its config.
        values: its inputs; the first two may be exchanged, and may be `QTensor`s.
        states: states of the calibrations.
        exchanged: whether the first value is the rhs of the equation.
    """
    lhs, rhs, *rest = values
    own = (rhs, lhs, *rest) if exchanged else values
    operation = _operation_of(eqn, own, exchanged=exchanged)
    takes_precision = not cfg.is_quantized or (
        operation.takes_precision and arithmetic.contracts_floats(cfg)
    )
    options = contraction.Options(
        precision=eqn.params["precision"] if takes_precision else None,
        preferred_element_type=eqn.outvars[0].aval.dtype,
        out_sharding=eqn.params["out_sharding"],
        states=states,
        order=_order(eqn, lhs.ndim) if exchanged else None,
    )
    out = contraction.contract(cfg, operation, lhs, rhs, options)
    return cast(jax.Array, out)  # Rules quantize no results.


def _order(eqn: Any, lhs_ndim: int) -> tuple[int, ...]:
    """Returns the permutation of an exchanged contraction's result.

    It moves the remaining axes of the first operand behind those of the second.
    """
    (_, rhs_ca), (batch, _) = eqn.params["dimension_numbers"]
    start, end = len(batch), lhs_ndim - len(rhs_ca)
    ndim = len(eqn.outvars[0].aval.shape)
    return (*range(start), *range(end, ndim), *range(start, end))


def _exchanged(dims: Any) -> Any:
    (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = dims
    return (rhs_ca, lhs_ca), (rhs_ba, lhs_ba)


def _geometry(params: dict[str, Any]) -> tuple[Any, ...]:
    return (
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        params["dimension_numbers"],
        params["feature_group_count"],
        params["batch_group_count"],
    )


def equation_of(eqn: Any) -> str | None:
    """Returns the axes of a `dot_general` as an einsum equation, None for other ones.

    >>> closed = jax.make_jaxpr(jnp.matmul)(jnp.ones((2, 3, 4)), jnp.ones((4, 5)))
    >>> equation_of(closed.eqns[0])
    'abc,cd->abd'
    """
    if eqn.primitive.name != "dot_general":
        return None
    (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = eqn.params["dimension_numbers"]
    letters = iter(string.ascii_lowercase + string.ascii_uppercase)
    lhs = [next(letters) for _ in eqn.invars[0].aval.shape]
    shared = dict(zip((*rhs_ca, *rhs_ba), (*lhs_ca, *lhs_ba), strict=True))
    rhs = [
        lhs[shared[axis]] if axis in shared else next(letters)
        for axis in range(len(eqn.invars[1].aval.shape))
    ]
    batch = [lhs[axis] for axis in lhs_ba]
    kept = [x for axis, x in enumerate(lhs) if axis not in (*lhs_ca, *lhs_ba)]
    kept += [x for axis, x in enumerate(rhs) if axis not in (*rhs_ca, *rhs_ba)]
    return f"{''.join(lhs)},{''.join(rhs)}->{''.join(batch + kept)}"


def smaller_size(eqn: Any) -> float:
    """Returns the number of elements of an equation's smaller operand.

    An operand of symbolic size (`jax.export`) counts as infinitely large.
    """
    sizes = [math.prod(atom.aval.shape) for atom in eqn.invars[:2]]
    return min((size for size in sizes if isinstance(size, int)), default=math.inf)
