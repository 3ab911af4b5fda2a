"""Planning the conversion of an NNX model's checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

from flax import nnx

from aqtlite.checkpoint import nnx_variables, tasks
from aqtlite.checkpoint import sample as sample_lib
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import Reader
from aqtlite.checkpoint.from_model import check_statistics
from aqtlite.checkpoint.job import Job
from aqtlite.checkpoint.manifest import NNX, Manifest
from aqtlite.checkpoint.names import name_of, path_name
from aqtlite.checkpoint.nnx_variables import MODEL
from aqtlite.checkpoint.variables import OF_MODELS, untraceable
from aqtlite.flax.call import Call
from aqtlite.flax.nnx import conversion
from aqtlite.flax.nnx.model import ATTRIBUTES, QuantizedModel
from aqtlite.flax.nnx.pure import PureCall
from aqtlite.flax.nnx.quantize import as_quantized
from aqtlite.jaxpr import tracing
from aqtlite.program.serving.model import Buffer
from aqtlite.quantization.state_collections import STATISTICS


def job_from_nnx(
    source: Reader,
    model: nnx.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    keep_float: Sequence[str],
) -> Job:
    """Plans the conversion that `aqtlite.flax.nnx.convert` does, from shapes alone.

    Args:
        source: the variables of the model.
        model: as `convert` takes it; shapes will do.
        args: sample inputs, as `convert` takes them; shapes will do.
        kwargs: sample inputs by name; shapes will do.
        keep_float: patterns of paths of weights, or of the parameters that they are
            functions of, to leave in float.

    Raises:
        CheckpointError: if the model cannot be traced, the source is not of this
            model, a pattern matches nothing, or the sample inputs cannot be stored.
        ValueError: as `convert` does.
    """
    quantized = as_quantized(model)
    sample = sample_lib.encode(args, kwargs)
    if sample is None:
        raise CheckpointError(
            "the sample inputs of an NNX model have to be arrays, shapes and plain "
            "Python values, in dictionaries, lists, named tuples and dataclasses of "
            "imported modules that are pytrees: the manifest records them, and loading "
            "traces the model with them"
        )
    shapes, origin = nnx_variables.match(source, quantized)
    statistics = {ATTRIBUTES[STATISTICS]: shapes.aqt.statistics}
    check_statistics(source, origin, statistics, "aqtlite.flax.nnx.calibrate")
    missing = nnx_variables.made_by_serving(quantized) - origin.keys()
    _check_traces(shapes, args, kwargs)
    planned = conversion.plan(shapes, [Call(*args, **kwargs)])
    names = tasks.Names(
        collection=MODEL,
        params=[name_of((MODEL, *one.path)) for one in planned.model.parameters],
        buffer=_name_of_buffer,
        origin=origin,
    )
    manifest = Manifest(
        {}, {}, model=name_of_model(quantized), sample=sample, framework=NNX
    )

    def tree_of(serving: QuantizedModel) -> dict[str, Any]:
        return nnx_variables.tree_of(serving, frozenset(missing))

    return tasks.job(source, planned, names, keep_float, manifest, tree_of)


def name_of_model(model: QuantizedModel) -> str:
    """The name of a model, for a manifest."""
    return type(model).__name__


def _check_traces(
    model: QuantizedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raises CheckpointError if the model itself raises with the sample inputs."""
    others = dict(kwargs)
    method = others.pop("method", "__call__")
    call = PureCall(model, method, args, others)
    try:
        tracing.trace(call.function, call.arguments)
    except OF_MODELS as error:
        raise untraceable(name_of_model(model), args, kwargs, error) from error


def _name_of_buffer(buffer: Buffer) -> str:
    collection, *below = buffer.key_path
    return "/".join((ATTRIBUTES[collection.key], path_name(below)))
