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
import json
import math
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple
from urllib import parse

import jax
import jax.numpy as jnp

from aqtlite import config, lowering
from aqtlite.contraction import accumulation, operand_scalars
from aqtlite.contraction.execution import ContractionExecution
from aqtlite.lowering import DotInput
from aqtlite.operations import SIDES, Operation, Side
from aqtlite.qtensor.qtensor import Operand, QTensor, dequantized
from aqtlite.quantization.preparation import rotation
from aqtlite.quantization.seeds import Seeds
from aqtlite.shapes.sharding import is_manual

What = Literal["operands", "outputs"]
"""What is noted: operands, or also results beside those of floats."""

Shapes = tuple[tuple[int, ...], tuple[int, ...]]

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
    cfg: config.Tensor
    """Its config."""

    contracting: tuple[int, ...]
    """Its contracting axes."""

    channels: int
    """Number of contracted elements that blocks could split, of one group."""

    can_smooth: bool
    """Whether its contraction could be smoothed, and is not."""

    can_rotate: bool
    """Whether its contraction could be rotated to advantage, and is not."""

    has_batch: bool
    """Whether its contraction has batch axes, as those of two activations have."""


@dataclasses.dataclass(frozen=True)
class Note:
    """What a noted equation holds: scalars of operands, then of the result."""

    path: str
    """ "fwd", "dlhs" or "drhs"."""

    shapes: Shapes
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


class Planned(NamedTuple):
    """What is known of a contraction: by a plan, or by Flax's attention."""

    path: str | None
    """Its path, in functions without name scopes that of a parameter. None if no rule
    quantizes it: its name scope."""

    is_of_activations: bool
    """Whether both operands are quantized as the lhs of the config that is given."""


@contextlib.contextmanager
def planned_as(planned: Planned) -> Iterator[None]:
    """Says what is known of the contraction inside; see `planned_of`."""
    if not is_tapping():
        yield
        return
    with jax.named_scope(_PLANNED + parse.quote(json.dumps(planned), "")):
        yield


def planned_of(scope: str) -> Planned | None:
    """Returns what is known of an equation with this name scope; None for nothing."""
    found = [one for one in scope.split("/") if one.startswith(_PLANNED)]
    if not found:
        return None
    return Planned(*json.loads(parse.unquote(found[-1].removeprefix(_PLANNED))))


def without_planned(scope: str) -> str:
    """Returns a name scope without what `planned_as` adds."""
    return "/".join(one for one in scope.split("/") if not one.startswith(_PLANNED))


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
    shapes = floats[0].shape, floats[1].shape
    for place, (side, one) in enumerate(zip(SIDES, (how.lhs, how.rhs), strict=True)):
        x, q = floats[place], quantized[place]
        if isinstance(x, QTensor) or q is None:
            continue
        axes = operation.axes(side)
        operands.append(_noted(how, operation, side, shapes))
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
    return _held(Note(how.path, shapes, tuple(operands), has_output), values, sums)


def noted_operand(
    q: QTensor,
    x: jax.Array,
    how: ContractionExecution,
    operation: Operation,
    side: Side,
    shapes: Shapes,
    seeds: Seeds,
    state: Any,
) -> QTensor:
    """Returns an operand that is quantized before the other, with its scalars beside.

    Args:
        q: the operand, quantized.
        x: the operand.
        how: execution of the contraction.
        operation: the contraction.
        side: side of the operand.
        shapes: shapes of both operands.
        seeds: seeds of its noise.
        state: state of its calibration.
    """
    one, axes = (how.lhs, how.rhs)[SIDES.index(side)], operation.axes(side)
    x = jax.lax.stop_gradient(x)
    values = operand_scalars.scalars_of(x, q.stop_gradient(), one, axes, seeds, state)
    note = Note(how.path, shapes, (_noted(how, operation, side, shapes),))
    return dataclasses.replace(q, qvalue=_held(note, values, q.qvalue))


def _held(note: Note, values: Sequence[Any], x: jax.Array) -> jax.Array:
    if not values:
        return x
    with _lock:
        number = _notes.setdefault(note, len(_notes))
    with jax.named_scope(f"{_SCOPE}_{number}"):
        held, *_ = jax.lax.optimization_barrier((x, *values))
    return held


def _noted(
    how: ContractionExecution,
    operation: Operation,
    side: Side,
    shapes: Shapes,
) -> Noted:
    place, axes = SIDES.index(side), operation.axes(side)
    sizes = [shapes[place][axis] for axis in axes.cuttable[-1:]]
    # Those of elements are of neither blocks nor rotated channels.
    is_plain = how.path == "fwd" and not how.has_element_scales
    # Spread over the channels, an outlier still meets the rounding of the other
    # operand, which on few bits is the larger error.
    other = (how.rhs, how.lhs)[place].tensor
    can_rotate = is_plain and not how.is_rotated and bits_of(other) >= 8
    if can_rotate:
        hadamard = config.Hadamard()
        can_rotate = rotation.order_of(hadamard, operation, *shapes, how.path) > 1
    return Noted(
        side,
        shapes[place],
        (how.lhs, how.rhs)[place].tensor,
        axes.contracting,
        1 if how.has_element_scales else math.prod(sizes) // axes.groups,
        is_plain and operation.pairs_elements and not how.is_smoothed,
        can_rotate,
        bool(axes.batch),
    )


def bits_of(tensor: config.Tensor) -> int:
    """Returns the width of an operand's grid in bits; 32 for an operand in float."""
    if not tensor.is_quantized:
        return 32
    found = re.search(r"\d+", tensor.grid.name)
    return int(found[0]) if found else 8


def _float32(x: Operand) -> jax.Array:
    return dequantized(x).astype(jnp.float32)
