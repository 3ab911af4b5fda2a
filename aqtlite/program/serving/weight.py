"""A weight to freeze: an operand of parameters alone, from its trace to its name."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from aqtlite.program.serving.contraction import OperandKey, WeightOutputs
from aqtlite.program.serving.frozen_record import IDENTITY, FrozenRecord, Operand
from aqtlite.program.serving.model import (
    Buffer,
    CallTrace,
    FoundOperand,
    Parameter,
    ParameterAxis,
)


class Refusal(NamedTuple):
    """The reason why an operand is not frozen."""

    why: str
    is_expected: bool = False
    """Whether it is no candidate, such as an activation, or stays float on request."""


UNTOLD = Refusal(
    "what it is made of could not be told at a call: it mixes elements (by a sum or a "
    "contraction), differs between the steps of a scan, or is partly made of a "
    "parameter that stays in float"
)

Member = tuple[int, OperandKey]
"""Index of a call, and the key of an operand in it."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight in the trace of one call; planned, also those that serve as it does."""

    index: tuple[int, int]
    """Index of the call, and of the weight in that call."""

    trace: CallTrace = dataclasses.field(repr=False)
    found: FoundOperand
    shape: tuple[int, ...]
    """Shape including axes stacked by transformations."""

    parameters: tuple[Parameter, ...]
    """Parameters that it is made of, sorted."""

    inputs: tuple[Parameter | Buffer, ...]
    """What its quantization reads: `parameters` and those of a learned calibration,
    sorted, and then other variables, sorted."""

    made: WeightOutputs
    """Indices of outputs of the trace."""

    record: FrozenRecord
    """What serving finds it by: its identity and what is beside it, once planned."""

    members: tuple[Member, ...]
    """Operands, of any call, that it serves: itself, and those like it once planned."""

    name: str = ""
    """Name among the weights of its module; empty while they are planned."""

    @property
    def key(self) -> OperandKey:
        """Key of the operand in its call."""
        return self.found.key

    @property
    def member(self) -> Member:
        """Key of the operand among those of all calls."""
        return self.index[0], self.key

    @property
    def operand(self) -> Operand:
        """The operand as the contraction sees it."""
        return self.found.operand

    @property
    def module(self) -> tuple[str, ...]:
        """Path of the module that contracts it."""
        return self.key.path

    @property
    def path(self) -> tuple[str, ...]:
        """Path of its `QTensor` in the collection "aqt"."""
        return (*self.module, self.name, self.record.operand.side)

    @property
    def outputs(self) -> dict[str, Any]:
        """Outputs of its trace to store, by key of the entry."""
        side: str = self.record.operand.side
        outputs = {side: self.made.qtensor}
        if self.record.identity is None:
            outputs[IDENTITY] = self.made.values
        return outputs

    def axes(self) -> Sequence[ParameterAxis | None]:
        """Returns, for each axis of its integers, the parameter axis it comes from."""
        return self.trace.axes_of_integers[self.index[1]]

    @property
    def compared(self) -> tuple[Parameter, ...]:
        """Parameters that stay in float beside a weight with a string identity.

        Samples of them are stored as its `IDENTITY`; serving compares them to detect
        that the parameters have changed.
        """
        removed = self.record.removed
        if not isinstance(self.record.identity, str) or removed is None:
            return ()
        return tuple(one for one in self.parameters if str(one) not in removed)

    def made_like(self, other: "Weight") -> bool:
        """Whether both are made of the same parameters and states in the same way."""
        return (
            self.found.identity is not None
            and self.found.identity == other.found.identity
            and (self.inputs, self.shape) == (other.inputs, other.shape)
        )
