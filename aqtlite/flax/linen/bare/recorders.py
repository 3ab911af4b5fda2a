"""What a conversion records of injected contractions: names, weights, fingerprints."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax

from aqtlite.flax.linen.bare import fingerprints, recording
from aqtlite.flax.linen.bare.recording import Recorder
from aqtlite.flax.linen.caller import Caller
from aqtlite.jaxpr import sites
from aqtlite.operations import Side
from aqtlite.program.serving.contraction import (
    Contraction,
    OperandKey,
    WeightOutputs,
)
from aqtlite.program.serving.frozen_record import COLLECTION
from aqtlite.program.serving.model import FoundOperand, StoredOperand
from aqtlite.qtensor.qtensor import QTensor

_numbers = itertools.count()

InjectedPlace = tuple[tuple[str, ...], int]
"""An injected contraction: the path of its module, and its position in it."""


class Naming:
    """A recorder that marks the operands and states of contractions with names."""

    def __init__(self) -> None:
        number = next(_numbers)
        self.num_contractions = 0
        self.states = f"states {number}"
        self.places: dict[str, InjectedPlace] = {}
        """Contractions of all marked operands, by name."""
        self.quantized: dict[str, FoundOperand] = {}
        """Operands to quantize, by name."""
        self._operand = f"operand {number}"

    def __call__(
        self, contraction: Contraction, caller: Caller, position: int
    ) -> Contraction:
        self.num_contractions += 1
        operands: dict[Side, Any] = {"lhs": contraction.lhs, "rhs": contraction.rhs}
        for side, x in operands.items():
            if isinstance(x, QTensor):
                continue
            name = f"{self._operand} {len(self.places)}"
            operands[side] = sites.with_name(x, name)
            self.places[name] = caller.path, position
            if side in contraction.quantized_sides():
                key = OperandKey(caller.path, position, side)
                self.quantized[name] = FoundOperand.of(
                    contraction, key, caller.obstacle
                )
        for state in jax.tree.leaves(contraction.states):
            sites.with_name(state, self.states)
        return dataclasses.replace(contraction, **operands)


def storing(
    keys: Collection[OperandKey],
    arrays: Callable[[Contraction, Side], Any],
    go_on: Callable[[Contraction, InjectedPlace], Contraction],
) -> Recorder:
    """Returns a recorder that stores arrays of operands.

    Args:
        keys: keys of the operands.
        arrays: function that returns the arrays to store for an operand.
        go_on: function from the recorded contraction to the one to evaluate.
    """

    def record(contraction: Contraction, caller: Caller, position: int) -> Contraction:
        for side in contraction.quantized_sides():
            key = OperandKey(caller.path, position, side)
            if key in keys and caller.obstacle is None:
                recording.store(StoredOperand(key, arrays(contraction, side)), caller)
        return go_on(contraction, (caller.path, position))

    return record


@contextlib.contextmanager
def shared_weights_explained() -> Iterator[None]:
    """Turns Flax's error about a broadcast collection "aqt" into advice.

    Flax raises it where steps of `nn.scan` share a weight, and have states of their own
    that quantize it: each has a frozen weight then.

    Raises:
        ValueError: if the trace inside the context raises that error.
    """
    try:
        yield
    except ValueError as error:
        if "broadcasted variable has a data dependency" not in str(error):
            raise
        raise ValueError(
            "the steps of an nn.scan share a weight, and each has calibration states "
            f"of its own that quantize it, but variable_broadcast has {COLLECTION!r}: "
            "the weight of each step is another. Quantize the model by rules "
            "(aqtlite.flax.quantize_model), where these steps share states; or give "
            "the weight a calibration without states; or leave it in float, by "
            f"variable_axes={{{COLLECTION!r}: 0}} beside the states"
        ) from error


def weight_outputs(contraction: Contraction, side: Side) -> WeightOutputs:
    """Returns what to record of a weight, with values to tell floats by."""
    outputs = contraction.weight_outputs(side)
    values = fingerprints.values_of(contraction.array(side))
    return dataclasses.replace(outputs, values=values)


def fingerprint(contraction: Contraction, side: Side) -> list[jax.Array]:
    """Returns the fingerprint of an operand."""
    return fingerprints.fingerprint(contraction.array(side))
