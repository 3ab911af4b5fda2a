"""The interface to a framework: a model that reports what its calls contract."""

import abc
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Any

import jax

from aqtlite.program.serving.contraction import OperandKey
from aqtlite.program.serving.frozen_record import FrozenEntry
from aqtlite.program.serving.identity import Identity
from aqtlite.program.serving.model import (
    Buffer,
    CallTrace,
    Discovery,
    FoundOperand,
    Parameter,
    buffers_of,
    parameters_of,
)
from aqtlite.program.serving.placeholder import Placeholder
from aqtlite.program.serving.statistics_uses import Uses
from aqtlite.program.serving.weight import UNTOLD, Refusal, Weight
from aqtlite.qtensor.qtensor import QTensor

KeyPath = tuple[Any, ...]
"""JAX's key path in a tree of parameters."""


class Model(abc.ABC):
    """A model with its variables and the calls that will be served."""

    def __init__(
        self,
        params: Any,
        others: Any,
        num_calls: int,
        is_box: Callable[[Any], bool] | None = None,
        given: Mapping[KeyPath, QTensor] | None = None,
    ):
        """Collects the leaves of the variables.

        Args:
            params: the parameters, or their shapes.
            others: the other variables, or their shapes.
            num_calls: number of calls.
            is_box: predicate for nodes that box parameters with metadata.
            given: parameters that are quantized already, by path.
        """
        self.parameters = parameters_of(params, is_box)
        self.buffers = buffers_of(others)
        self.values: dict[Parameter | Buffer, Any] = {}
        self.values.update(self.buffers.items())
        leaves = jax.tree.leaves(params)
        self.values.update(zip(self.parameters, leaves, strict=True))
        by_path = {one.key_path: one for one in self.parameters}
        self.given = {by_path[path]: q for path, q in (given or {}).items()}
        """Parameters that are quantized already."""

        self.values.update(self.given.items())
        self.num_calls = num_calls
        self.uses_of_statistics = Uses()
        """Uses of statistics in the calls discovered so far."""

    def float_value(self, one: Parameter | Buffer) -> Any:
        """Returns the value of a variable, decoded if it is quantized already."""
        value = self.values[one]
        if one in self.given:
            return value.dequant().astype(one.dtype)
        return value

    def left_in_float(self, params: Any, frozen: Container[Parameter]) -> Any:
        """Returns parameters, with those decoded that are given and not frozen.

        Args:
            params: the parameters, with the shapes of those that are given.
            frozen: parameters that nothing reads in float.
        """
        stay = {p.key_path: p for p in self.given if p not in frozen}
        if not stay:
            return params
        return jax.tree.map_with_path(
            lambda path, x: self.float_value(stay[path]) if path in stay else x, params
        )

    @abc.abstractmethod
    def discover(self, call: int) -> Discovery:
        """Traces a call and returns the quantized operands with their origins."""

    @abc.abstractmethod
    def record(self, call: int, weights: Sequence[FoundOperand]) -> CallTrace:
        """Traces a call with the `WeightOutputs` of weights as outputs.

        Args:
            call: index of the call, which was discovered.
            weights: operands of the call that are weights.
        """

    def made_of_weights(
        self, weights: Mapping[OperandKey, Sequence[FoundOperand]]
    ) -> Collection[OperandKey]:
        """Returns weights that serving may not tell from results of frozen ones.

        None, where serving sees how operands are made.

        Args:
            weights: operands of one call that are weights, by key.
        """
        del weights
        return ()

    def identities(
        self,
        call: int,
        weights: Sequence[Weight],
        frozen: Mapping[Parameter, Placeholder],
    ) -> list[Identity | Refusal | None]:
        """Returns what serving finds weights by: digests of their computations.

        Args:
            call: index of the call.
            weights: weights of the call.
            frozen: placeholders of the parameters that only frozen weights read.

        Returns:
            For each weight its identity; None if stored values identify it
            (`WeightOutputs.values`); or why serving cannot tell it from others.
        """
        return [one.found.identity or UNTOLD for one in weights]

    def finds_alike(self, weight: Weight, other: Weight) -> bool:
        """Whether serving cannot tell apart two weights with identities."""
        return weight.found.weight == other.found.weight

    def why_states_differ(self, weight: Weight) -> str:
        """Returns why serving cannot tell apart weights of a layer's several states.

        Args:
            weight: one of the weights, which are made of equal parameters.
        """
        del weight
        return (
            "it is made by contractions that have calibration states of their own in "
            "each call of its layer"
        )

    @abc.abstractmethod
    def serving(
        self,
        weights: Sequence[Weight],
        stored: Sequence[FrozenEntry],
        frozen: Mapping[Parameter, Placeholder],
    ) -> Any:
        """Returns the serving variables, or shapes if the model's values are shapes.

        Second moments of inputs, which only a conversion reads, are left out.

        Args:
            weights: the weights of the plan.
            stored: what of each is stored.
            frozen: placeholders for the parameters that nothing else reads.
        """

    @abc.abstractmethod
    def fix_scales(self, serving: Any) -> Any:
        """Returns serving variables with fixed scales in place of statistics."""

    def quantized_elsewhere(self) -> Mapping[Parameter, str]:
        """Returns parameters quantized where no trace shows it, with the reasons."""
        return {}
