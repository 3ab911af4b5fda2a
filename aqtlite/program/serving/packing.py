"""Frozen weights packed as the kernels of a platform read them."""

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp

from aqtlite.config import arithmetic
from aqtlite.lowering.forms import panel_products
from aqtlite.program.serving.frozen_record import FrozenEntry, FrozenRecord
from aqtlite.program.serving.planning import Plan
from aqtlite.qtensor.packed_values import PackedValues
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.shapes.sharding import explicit_spec

PLATFORMS = ("cpu",)
"""Platforms that have a packed form."""

PACKED = "packed for CPUs"
UNPACKED = "unpacked at every call here, without the extra 'cpu'"


def check(platform: str | None) -> None:
    """Raises ValueError for a platform without a packed form."""
    if platform is not None and platform not in PLATFORMS:
        raise ValueError(
            f"packed={platform!r} is no platform with packed weights; give 'cpu', or "
            "None, which every platform reads as it is"
        )


def packed(plan: Plan, stored: Sequence[FrozenEntry]) -> list[FrozenEntry]:
    """Packs those weights of a plan that the kernel for CPUs reads.

    Args:
        plan: the plan of a conversion.
        stored: its frozen weights, or their shapes.
    """
    matrices = matrices_of(plan)
    return [
        entry(one) if weight.index in matrices else one
        for weight, one in zip(plan.weights, stored, strict=True)
    ]


def pack(record: FrozenRecord, q: QTensor) -> QTensor:
    """Packs a frozen weight; one that the kernel does not read stays as it is.

    Args:
        record: its record.
        q: its integers and scales, arrays or shapes.
    """
    operand, contracted = record.operand, len(record.operand.contracting)
    leading = q.ndim - len(operand.shape)
    order = tuple(range(len(operand.shape))) if q.order is None else q.order
    is_last = contracted > 0 and order[-contracted:] == operand.contracting
    if (
        not _are_integers(record, q)
        or explicit_spec(q.qvalue) is not None  # Panels would be split unevenly.
        or q.shape[leading:] != operand.shape
        or not is_last
    ):
        return q
    shape = q.qvalue.shape[leading:]
    counts = q.scale.shape[-contracted:]
    tiles, products = math.prod(counts), math.prod(shape[-contracted:])
    bits = jnp.iinfo(q.qvalue.dtype).bits
    # Those of a block lie one behind another if it spans no other contracting axis.
    are_whole = counts[:-1] == shape[-contracted:-1]
    if tiles > 1 and (not are_whole or products % tiles):
        return q
    columns = math.prod(shape) // max(products, 1)
    if not panel_products.reads(columns, products // tiles, bits):
        return q
    values = PackedValues.of(q.qvalue, contracted, leading)
    return dataclasses.replace(q, qvalue=values)


def entry(one: FrozenEntry) -> FrozenEntry:
    """Packs a frozen weight, and notes it, as `pack`."""
    side = one.record.operand.side
    q = one.values[side]
    found = pack(one.record, q)
    if found is q:
        return one
    missing = "" if panel_products.runs_here() else UNPACKED
    note = ", ".join(filter(None, (one.rounding, PACKED, missing)))
    return one._replace(values={**one.values, side: found}, rounding=note)


def _are_integers(record: FrozenRecord, q: QTensor) -> bool:
    """Whether a weight holds int4 or int8, contracted as such with floats or bytes."""
    raw, grid = record.cfg.fwd, q.numerics
    if raw.lhs.is_integer and raw.lhs.grid.storage_dtype.itemsize > 1:
        return False
    accumulator = raw.dg_accumulator_dtype
    is_rounded = accumulator is not None and jnp.issubdtype(accumulator, jnp.floating)
    is_signed = grid is None or grid.storage_dtype != jnp.uint4
    return not is_rounded and (
        record.operand.side == "rhs"
        and raw.rhs.is_integer
        and arithmetic.sums_integers(raw)
        and q.qvalue.dtype in (jnp.int4, jnp.int8)
        and q.zero_point is None
        and is_signed
    )


def matrices_of(plan: Plan) -> frozenset[tuple[int, int]]:
    """Returns the weights that are read as matrices by all of their contractions."""
    others = {
        (call, one.key)
        for call, found in enumerate(plan.discoveries)
        for one in found.operands
        if not one.is_matrix
    }
    return frozenset(
        one.index for one in plan.weights if others.isdisjoint(one.members)
    )
