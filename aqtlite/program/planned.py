"""A contraction of a program, what rules make of it, and its evaluation."""

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

Kind = Literal["weight", "activation", "constant"]


@dataclasses.dataclass(frozen=True)
class PlannedOperand:
    """An operand of a contraction."""

    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    """"weight": its value depends on nothing but parameters. "constant": on nothing."""

    def __str__(self) -> str:
        return f"{self.kind} {self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class PlannedContraction:
    """A contraction of a program, and what becomes of it."""

    path: str
    """The name scopes around it, and its number if there are several of the path."""

    module: str
    """The path without the number."""

    op: str
    """The function of `jax.lax` that contracts."""

    registered: str | None
    """The name of the kernel or function that it is a part of (`register_operation`),
    if so."""

    equation: str | None
    """Of a `dot_general`: its axes as an einsum's equation."""

    lhs: PlannedOperand
    rhs: PlannedOperand
    rule: int | None
    """The index of the rule that decides; None if there is none."""

    cfg: config.DotGeneral
    """The config by which it is quantized, `config.unquantized()` for none."""

    why_float: str | None
    """Why it stays in float, if so."""

    why_not_smoothed: str | None
    """Why it takes the config of the rule without its smoothing, if so."""

    is_injected: bool
    """The config was given where it is called, and goes before those of rules."""

    site: Site = dataclasses.field(repr=False, compare=False)

    @property
    def description(self) -> str:
        """What it computes: its axes, or operation, and the kernel that does."""
        what = self.equation or self.op
        return what if self.registered is None else f"{self.registered}: {what}"

    @property
    def is_quantized(self) -> bool:
        """True unless it stays in float."""
        return self.why_float is None

    @property
    def is_exchanged(self) -> bool:
        """True if its weight is its lhs, which takes the part of the config's rhs."""
        if self.is_injected:
            return False
        is_weight = self.lhs.kind == "weight" and self.rhs.kind != "weight"
        return self.op == "dot_general" and is_weight

    def in_order(self, values: Sequence[Any]) -> list[Any]:
        """Returns its inputs with the weight, if it has one, as the second."""
        lhs, rhs, *rest = values
        return [rhs, lhs, *rest] if self.is_exchanged else [lhs, rhs, *rest]

    def index(self, side: Side) -> int:
        """Returns the index of an operand among the inputs of its equation."""
        return int((side == "rhs") != self.is_exchanged)

    def operation(self, values: Sequence[Any]) -> Operation:
        """Returns its operation, of operands in the order of the config.

        Args:
            values: the inputs of its equation, or their types.
        """
        return _operation_of(self.site.eqn, values, exchanged=self.is_exchanged)

    @property
    def operation_name(self) -> str:
        """The name of its operation, by which its states are kept."""
        if self.op == "ragged_dot":
            return self.op
        return self.operation([atom.aval for atom in self.site.eqn.invars]).name

    def contract(
        self, cfg: DotGeneral, operands: Sequence[Any], states: States
    ) -> list[jax.Array]:
        """Evaluates it, quantized.

        Args:
            cfg: the config.
            operands: inputs of its equation, `in_order`; may be `QTensor`s.
            states: states of the calibrations.
        """
        exchanged = self.is_exchanged
        return [_contract(self.site.eqn, cfg, operands, states, exchanged=exchanged)]

    def in_float(self, values: Sequence[Any]) -> list[jax.Array]:
        """Evaluates it as it was.

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
        exchanged: a `dot_general` is to have its operands the other way round.
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
        values: its inputs, of which the first two may be exchanged, and `QTensor`s.
        states: states of the calibrations.
        exchanged: they are: the first one is the rhs of the equation.
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
    """The permutation of the result of exchanged operands: lhs's axes go last."""
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
    """The axes of a `dot_general` as an einsum's equation; None for other primitives.

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
    """How many elements the smaller operand of an equation has.

    One whose size is symbolic (`jax.export`) is taken for the larger one; infinity if
    both are.
    """
    sizes = [math.prod(atom.aval.shape) for atom in eqn.invars[:2]]
    return min((size for size in sizes if isinstance(size, int)), default=math.inf)
