"""What the rounding of operands does, noted where they are quantized.

While `tapping` is in effect, a contraction computes a few scalars about each operand
that it quantizes, in the forward pass and in the gradients alike. One equation, a
`jax.lax.optimization_barrier`, holds them together with the sums of products, so that
no transformation drops them; its name scope says what they are of (`note_of`).
`aqtlite.taps` makes these equations outputs of a program.

All of them are scalars: `jax.vmap` and `jax.lax.scan` then add axes, and leave no doubt
which these are.
"""

import contextlib
import dataclasses
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Literal
from urllib import parse

import jax
import jax.numpy as jnp

from aqtlite import lowering
from aqtlite.contraction import accumulation, operand_scalars
from aqtlite.contraction.execution import ContractionExecution, OperandExecution
from aqtlite.lowering import DotInput
from aqtlite.operations import SIDES, OperandAxes, Operation
from aqtlite.qtensor.qtensor import Operand, QTensor
from aqtlite.quantization.seeds import Seeds
from aqtlite.shapes.sharding import is_manual

What = Literal["operands", "outputs"]
"""What is noted: operands, or also results beside those of floats."""

# A user context is part of JAX's cache keys, so traces with and without it stay apart.
_tapping = jax.make_user_context(default_value=None)

_SCOPE = "aqtlite_tap"
_NUMBER = re.compile(rf"\b{_SCOPE}_(\d+)\b")
_PLANNED = "aqtlite_planned:"


@dataclasses.dataclass(frozen=True)
class Noted:
    """An operand whose scalars are noted."""

    side: str
    """ "lhs" or "rhs"."""

    shape: tuple[int, ...]
    grid: str
    """Name of its grid, such as ``int8``."""

    contracting: tuple[int, ...]
    """Its contracting axes."""

    has_state: bool
    """Whether its scale comes from statistics of earlier batches, or is learned."""


@dataclasses.dataclass(frozen=True)
class Note:
    """What a noted equation holds: scalars of operands, then of the result."""

    path: str
    """ "fwd", "dlhs" or "drhs"."""

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    """Shapes of both operands."""

    operands: tuple[Noted, ...]
    has_output: bool = False
    """Whether the decibels of the result against that of floats follow."""


_notes: dict[Note, int] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def tapping(what: What) -> Iterator[None]:
    """Lets contractions that are traced note what their rounding does."""
    with _tapping(what):
        yield


def is_tapping() -> bool:
    """Whether `tapping` is in effect, where values can leave the program."""
    return _tapping.value is not None and not is_manual()


@contextlib.contextmanager
def planned_as(path: str) -> Iterator[None]:
    """Says by which path a plan knows the contraction inside; see `planned_path`."""
    if not is_tapping():
        yield
        return
    with jax.named_scope(_PLANNED + parse.quote(path, "")):
        yield


def planned_path(scope: str) -> str | None:
    """Returns the path of a plan for an equation with this name scope; None for none.

    Paths of functions without name scopes are those of parameters, which a plan knows.
    """
    found = [one for one in scope.split("/") if one.startswith(_PLANNED)]
    return parse.unquote(found[-1].removeprefix(_PLANNED)) if found else None


def note_of(scope: str) -> Note | None:
    """Returns what an equation with this name scope holds; None for nothing."""
    found = _NUMBER.findall(scope)
    return list(_notes)[int(found[-1])] if found else None


def noted_sums(
    how: ContractionExecution,
    operation: Operation,
    floats: tuple[Operand, Operand],
    quantized: tuple[QTensor | None, QTensor | None],
    seeds: tuple[Seeds, Seeds],
    states: tuple[Any, Any],
    sums: jax.Array,
) -> jax.Array:
    """Returns the sums of products of a contraction, with scalars beside them.

    Args:
        how: execution of the contraction.
        operation: the contraction.
        floats: the operands; those that are `QTensor`s are not noted.
        quantized: the operands after quantization; None for those left in float.
        seeds: seeds of their noise.
        states: states of their calibrations.
        sums: the sums of their products.
    """
    operands, values = list[Noted](), list[Any]()
    for place, (side, one) in enumerate(zip(SIDES, (how.lhs, how.rhs), strict=True)):
        x, q = floats[place], quantized[place]
        if isinstance(x, QTensor) or q is None:
            continue
        axes = operation.axes(side)
        operands.append(_noted(side, x, one, axes))
        values += operand_scalars.scalars_of(
            x, q, one, axes, seeds[place], states[place]
        )
    has_output = _tapping.value == "outputs"
    if has_output:
        out = accumulation.scaled(how, operation, sums, *quantized)
        kind = lowering.Floats(jax.lax.Precision.HIGHEST, None)
        left, right = (DotInput(_float32(x)) for x in floats)
        exact = operation.contract(kind, left, right, how.out_sharding)
        values.append(operand_scalars.decibels(exact, out.astype(jnp.float32)))
    shapes = floats[0].shape, floats[1].shape
    return _held(Note(how.path, shapes, tuple(operands), has_output), values, sums)


def noted_operand(
    q: QTensor,
    x: jax.Array,
    other: Operand,
    one: OperandExecution,
    axes: OperandAxes,
    seeds: Seeds,
    state: Any,
) -> QTensor:
    """Returns an operand that is quantized before the other, with its scalars beside.

    Args:
        q: the operand, quantized.
        x: the operand.
        other: the other operand.
        one: execution of the operand.
        axes: its axes.
        seeds: seeds of its noise.
        state: state of its calibration.
    """
    x = jax.lax.stop_gradient(x)
    path, _, side = one.path.partition(".")
    values = operand_scalars.scalars_of(x, q.stop_gradient(), one, axes, seeds, state)
    shapes = (x.shape, other.shape) if side == "lhs" else (other.shape, x.shape)
    note = Note(path, shapes, (_noted(side, x, one, axes),))
    return dataclasses.replace(q, qvalue=_held(note, values, q.qvalue))


def _held(note: Note, values: Sequence[Any], x: jax.Array) -> jax.Array:
    if not values:
        return x
    with _lock:
        number = _notes.setdefault(note, len(_notes))
    with jax.named_scope(f"{_SCOPE}_{number}"):
        held, *_ = jax.lax.optimization_barrier((x, *values))
    return held


def _noted(side: str, x: jax.Array, one: OperandExecution, axes: OperandAxes) -> Noted:
    how = one.tensor.calibration
    has_state = how.has_state or how.is_learned
    name = one.tensor.grid.name
    return Noted(side, x.shape, name, axes.contracting, has_state)


def _float32(x: Operand) -> jax.Array:
    floats = x.dequant() if isinstance(x, QTensor) else x
    return floats.astype(jnp.float32)
