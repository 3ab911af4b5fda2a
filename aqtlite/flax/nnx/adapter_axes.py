"""Sharding metadata of adapters, carried over from their weights."""

from typing import Any

from flax import nnx

from aqtlite.flax.nnx import partitioning
from aqtlite.flax.nnx.model import RECORD, QuantizedModel
from aqtlite.flax.nnx.pure import PureCall
from aqtlite.program import served
from aqtlite.program.adapters import low_rank, merging
from aqtlite.program.planned import PlannedContraction
from aqtlite.program.program import Program
from aqtlite.program.serving.frozen_record import FrozenEntry


def metadata_of_adapters(
    model: QuantizedModel, call: PureCall, program: Program
) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns the metadata of the variables of adapters, by path and name.

    The axes of an adapter have the names of the weight's axes, and that of the rank
    none.

    Args:
        model: a model, float or converted.
        call: a call of it.
        program: the call with its plan and parameters.
    """
    if not partitioning.has_names(model):
        return {}
    axes = merging.axes_of_weights(program)
    found = {}
    for one in program.plan.replaced():
        if one.adapter is None:
            continue
        frozen = _frozen(model, program, one)
        if frozen is None:
            names, beside = partitioning.names_of_axes(
                axes[one.site.location], call.variables
            )
        else:
            names, beside = partitioning.names_of_weight(frozen)
        if any(names):
            found[one.kept_as] = {
                name: partitioning.metadata_of_names(each, beside)
                for name, each in low_rank.names(one, names).items()
            }
    return found


def _frozen(
    model: QuantizedModel, program: Program, one: PlannedContraction
) -> nnx.Variable[Any] | None:
    """Returns the frozen weight of a contraction, if it has one."""
    module = program.module_of(one)
    variables = model.aqt.frozen.get("/".join(module), {})
    own = (
        FrozenEntry(module, name, variable.get_metadata(RECORD), {})
        for name, variable in variables.items()
    )
    entry = next(served.identified(program, one, "rhs", own), None)
    return None if entry is None else variables[entry.name]
