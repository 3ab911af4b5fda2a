"""Errors of serving, with the same messages for every way of serving.

Injected Linen functions, models and functions quantized by rules, and NNX models look
up frozen weights in their own ways and share these checks. Every message names the
parameter, the problem and the remedy.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import config
from aqtlite.contraction import refused_gradient
from aqtlite.lowering import fusion
from aqtlite.program.serving.frozen_record import (
    COLLECTION,
    FrozenEntry,
    FrozenRecord,
    Operand,
)
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.quantization import double_scales

LINEN = "aqtlite.flax.convert(model, variables, calls=[Call(...), ...])"
NNX = "aqtlite.flax.nnx.convert(model, calls=[Call(...), ...])"
FUNCTION = "aqtlite.convert_function(fn_q, params, *args)"

_QTENSOR = {"qvalue", "scale"}
"""Fields of a `QTensor` that are arrays."""

RESTORED = (
    "serving variables that were restored without a target have None or {} in place of "
    "what holds no arrays. Restore them with jax.eval_shape of the conversion as "
    "target, or load a checkpoint of `aqtlite convert` with "
    "aqtlite.checkpoint.load_serving"
)
"""Cause of static values that are missing after a restore, and the remedy."""


def check_restored(collection: Any) -> None:
    """Refuses frozen weights restored without their static records.

    Args:
        collection: the frozen weights, by name.

    Raises:
        ValueError: if a weight has its arrays but no record.
    """
    for path, node in _mappings(collection, ()):
        # "qvalue" and "scale" may also be names of modules.
        if node.keys() >= _QTENSOR and not isinstance(node["qvalue"], Mapping):
            raise ValueError(
                f"the frozen weight at {'/'.join((COLLECTION, *path))!r} has arrays "
                f"and no record of its contraction: {RESTORED}"
            )


def _mappings(
    node: Any, path: tuple[str, ...]
) -> Iterable[tuple[tuple[str, ...], Mapping[str, Any]]]:
    if isinstance(node, Mapping):
        yield path, node
        for name, child in node.items():
            yield from _mappings(child, (*path, str(name)))


def check_recipe(record: FrozenRecord, stored: Collection[str]) -> None:
    """Refuses to restore a frozen weight into a target of another config.

    Args:
        record: record of the target.
        stored: names in the saved recipe; empty in checkpoints older than recipes.

    Raises:
        ValueError: if the recipes differ.
    """
    if stored and set(stored) != set(record.recipe or ()):
        weight = " and ".join(record.made_of)
        raise ValueError(
            f"the frozen weight of {weight!r} was saved with another config, or of "
            "another contraction, than the target has: restore it into the abstract "
            "serving variables of the conversion that was saved"
        )


def check_not_beside_floats(
    record: FrozenRecord, floats: Collection[str], converter: str
) -> None:
    """Refuses a frozen weight beside the float parameters that it replaced.

    Args:
        record: record of the weight.
        floats: paths of the float parameters.
        converter: the user's call of the conversion, for the message.

    Raises:
        ValueError: if a parameter that the conversion removed is there again.
    """
    for name in record.removed or ():
        if name in floats:
            raise ValueError(
                f"parameter {name!r} is a float, but the weight that was frozen of it "
                "is there too and would be served in its place: convert the float "
                f"parameters again with {converter}"
            )


def check_place(parameter: str, number: int, converted: int, converter: str) -> None:
    """Refuses a frozen parameter that has moved since the conversion.

    Args:
        parameter: path of the parameter.
        number: its index among the parameters.
        converted: its index in the conversion.
        converter: the user's call of the conversion, for the message.

    Raises:
        ValueError: if the indices differ.
    """
    if number != converted:
        raise ValueError(
            f"parameter {parameter!r} is number {number} of the parameters, but what "
            f"is frozen there was number {converted} when it was converted: layers of "
            "serving variables cannot be moved, repeated or left out. Change the float "
            f"parameters, and convert them again with {converter}"
        )


def check_has_weight(
    parameter: str,
    records: Iterable[tuple[Sequence[str], FrozenRecord]],
    converter: str,
) -> None:
    """Refuses a frozen parameter without a frozen weight made of it.

    Args:
        parameter: path of the parameter.
        records: records of the frozen weights, each with the path of its module.
        converter: the user's call of the conversion, for the message.

    Raises:
        ValueError: if no frozen weight is made of it.
    """
    path = tuple(parameter.split("/"))
    if not any(record.is_made_of(module, path) for module, record in records):
        refuse_missing(parameter, converter)


def refuse_missing(parameter: str, converter: str) -> NoReturn:
    """Raises the error of `check_has_weight`.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"parameter {parameter!r} is frozen, but its frozen weight is missing from "
        f"the collection {COLLECTION!r}: the variables are incomplete, or those of "
        "another model or another conversion. Serve what one conversion returned, or "
        f"convert the float parameters again with {converter}"
    )


def refuse_another_way(
    parameter: str, operand: Operand, where: str, converter: str
) -> NoReturn:
    """Refuses an operand made of frozen parameters as in no converted call.

    Args:
        parameter: path of one of the parameters.
        operand: the operand made of it.
        where: the contraction, or its module.
        converter: the user's call of the conversion, for the message.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"parameter {parameter!r} is frozen, but the {operand} of a contraction of "
        f"axes {operand.contracting} in {where} is made of it in another way, or "
        "quantized with another state, than in the calls that were converted: convert "
        f"this call, too, with {converter}"
    )


def refuse_float_read(parameter: str, why: str, converter: str) -> NoReturn:
    """Refuses to read a frozen parameter as a float.

    Args:
        parameter: path of the parameter.
        why: reason why no frozen weight takes its place.
        converter: the user's call of the conversion, for the message.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"parameter {parameter!r} is frozen, but {why}: serve with the model, config "
        "and calls of the conversion, or convert this call, too, with "
        f"{converter}"
    )


def fitting(
    named: Sequence[tuple[str, FrozenEntry]],
    cfg: config.DotGeneral,
    operand: Operand,
    steps: tuple[int, ...],
    converter: str,
) -> list[FrozenEntry]:
    """Returns the frozen weights that fit an operand.

    Args:
        named: candidate weights, each with a name for messages.
        cfg: config of the contraction.
        operand: the operand.
        steps: sizes of the leading axes that hold one weight per step of a scan.
        converter: the user's call of the conversion, for the message.

    Raises:
        ValueError: if a fitting weight is not stored as it was converted; or if there
            are candidates, and none fits.
    """
    found = [one for one in named if one[1].record.fits(cfg, operand)]
    for name, entry in found:
        _check_stored(name, entry, steps, converter)
    if not found:
        for name, entry in named:
            if entry.record.cfg == cfg:
                refuse_another_operand(name, entry.record.operand, operand, converter)
        for name, entry in named:
            refuse_another_config(name, entry.record.cfg, cfg, converter)
    return [_as_contracted(entry) for _, entry in found]


def _as_contracted(entry: FrozenEntry) -> FrozenEntry:
    """Decodes double scales, and marks a weight whose rotation the config records."""
    record, side = entry.record, entry.record.operand.side
    weight = double_scales.decoded(entry.values[side])
    weight = dataclasses.replace(weight, rotation=record.cfg.fwd.rotation)
    return entry._replace(values={**entry.values, side: weight})


def refuse_another_config(
    weight: str, converted: config.DotGeneral, called: config.DotGeneral, converter: str
) -> NoReturn:
    """Refuses a contraction with another config than its weight was frozen with.

    Args:
        weight: name of the weight.
        converted: config in the conversion.
        called: config in the call.
        converter: the user's call of the conversion, for the message.

    Raises:
        ValueError: always.
    """
    changes = "; ".join(config.differences(converted, called))
    raise ValueError(
        f"the frozen weight {weight!r} was converted with another config than it is "
        "called with. Serve with the config of the conversion, or convert the float "
        f"parameters again with {converter}. Converted and called: {changes}"
    )


def refuse_another_operand(
    weight: str, converted: Operand, called: Operand, converter: str
) -> NoReturn:
    """Refuses an operand of another shape or dtype than its frozen weight.

    Args:
        weight: name of the weight.
        converted: operand in the conversion.
        called: operand in the call.
        converter: the user's call of the conversion, for the message.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"the frozen weight {weight!r} was converted as {converted} and is called as "
        f"{called}: serve what one conversion returned, or convert this call, too, "
        f"with {converter}"
    )


def _check_stored(
    weight: str, entry: FrozenEntry, steps: tuple[int, ...], converter: str
) -> None:
    operand = entry.record.operand
    qtensor = entry.values.get(operand.side)
    if not isinstance(qtensor, QTensor):
        refuse_missing(weight, converter)
    if qtensor.shape != (*steps, *operand.shape):
        raise ValueError(
            f"the frozen weight {weight!r} has shape {qtensor.shape}, but was "
            f"converted as {operand}: serve what one conversion returned, or convert "
            f"the float parameters again with {converter}"
        )
    if qtensor.scale.dtype != np.dtype("float32"):
        raise ValueError(
            f"the scale of the frozen weight {weight!r} is {qtensor.scale.dtype}, but "
            "scales are float32: rounding them would change every product. Cast the "
            "parameters before they are converted, or what is left of them, and leave "
            f"the collection {COLLECTION!r} as it is"
        )


def unless_stale(
    weight: str, frozen: QTensor, is_same: jax.Array, converter: str
) -> QTensor:
    """Returns a frozen weight if the floats beside it have not changed.

    With a traced `is_same` that turns out false, its scale is NaN.

    Args:
        weight: name of the weight.
        frozen: the weight.
        is_same: whether the floats beside it still have the values it was made of.
        converter: the user's call of the conversion, for the message.

    Raises:
        ValueError: if `is_same` is concrete and false.
    """
    if not isinstance(is_same, jax.core.Tracer):
        if is_same:
            return frozen
        raise ValueError(
            f"the parameter that the frozen weight {weight!r} was made of stays beside "
            "it for its other uses, and has other values now, or is contracted in "
            "another way here: convert the float parameters again with "
            f"{converter}"
        )
    scale = jnp.where(is_same, frozen.scale, jnp.float32(jnp.nan))
    # XLA cannot fold the comparison, and must not fuse it into what follows.
    return dataclasses.replace(frozen, scale=fusion.barrier(scale))


def without_gradient(weight: str, frozen: QTensor, operand: jax.Array) -> QTensor:
    """Returns a frozen weight that refuses gradients of its float parameters.

    Args:
        weight: name of the weight.
        frozen: the weight.
        operand: the float operand that the weight replaces.

    Raises:
        TypeError: if the float operand is differentiated.
    """
    message = (
        "a gradient was asked with respect to parameters of which the weight "
        f"{weight!r} is frozen: it would be that of their other uses alone. "
        "Serving variables are not for training: differentiate with respect to "
        "other parameters, or train the float variables and convert them again"
    )
    scale = refused_gradient.refused(frozen.scale, operand, message)
    return dataclasses.replace(frozen, scale=scale)


def untrained(parameter: str, value: jax.Array, marker: Any) -> jax.Array:
    """Returns a value that is made of a frozen parameter, and refuses its gradient.

    Args:
        parameter: path of the parameter.
        value: the value.
        marker: the parameter's marker (`Placeholder.marker`); None for none.

    Raises:
        TypeError: if the marker is differentiated.
    """
    if marker is None:
        return value
    message = (
        f"a gradient was asked with respect to parameter {parameter!r}, which is "
        "frozen and cannot be trained. Differentiate with respect to parameters in "
        "float alone (aqtlite.is_frozen tells them apart); or, to train this one, "
        "convert a model that leaves its contractions in float: "
        "Rule(path=..., cfg=None), or AqtDotGeneral(None)"
    )
    return refused_gradient.refused(value, marker, message)
