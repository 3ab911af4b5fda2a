"""Planning the conversion of a Linen model's checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

from aqtlite.checkpoint import sample as sample_lib
from aqtlite.checkpoint import tasks
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import Reader
from aqtlite.checkpoint.job import Job
from aqtlite.checkpoint.manifest import Manifest
from aqtlite.checkpoint.names import path_name
from aqtlite.checkpoint.variables import PARAMS, match
from aqtlite.flax.call import Call
from aqtlite.flax.linen import convert as linen_convert
from aqtlite.flax.linen.quantize_model import Model
from aqtlite.quantization.state_collections import STATISTICS
from aqtlite.quantization.statistics import counts_of


def job_from_model(
    source: Reader,
    model: Model,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    keep_float: Sequence[str],
) -> Job:
    """Plans the conversion that `aqtlite.flax.convert` does, from shapes alone.

    Args:
        source: variables, or their collection "params" alone. Where the model boxes a
            parameter (`nn.with_partitioning`), the source may hold it without the box.
        model: as `convert` takes it.
        args: sample inputs, as `convert` takes them; shapes will do.
        kwargs: sample inputs by name; shapes will do.
        keep_float: patterns of paths of weights, or of the parameters that they are
            functions of, to leave in float.

    Raises:
        CheckpointError: if the model cannot be traced, the source is not of this
            model, or a pattern matches nothing.
        ValueError: as `convert` does.
    """
    variables, origin = match(source, model, args, kwargs)
    collection = {STATISTICS: variables.get(STATISTICS)}
    check_statistics(source, origin, collection, "aqtlite.flax.calibrate")
    names = tasks.Names(
        collection=PARAMS,
        params=[name for name in origin if name.startswith(f"{PARAMS}/")],
        buffer=lambda buffer: path_name(buffer.key_path),
        origin=origin,
    )
    plan = linen_convert.plan(model, variables, [Call(*args, **kwargs)])
    manifest = Manifest(
        {}, {}, model=repr(model), sample=sample_lib.encode(args, kwargs)
    )
    return tasks.job(source, plan, names, keep_float, manifest)


def check_statistics(
    source: Reader, origin: Mapping[str, str], statistics: Any, calibrate: str
) -> None:
    """Checks that statistics of activations are of some batch.

    Args:
        source: the float checkpoint.
        origin: names that it has for variables.
        statistics: statistics of the model, as shapes, in a tree of their names.
        calibrate: the function that gathers them.

    Raises:
        CheckpointError: if they are not.
    """
    for path, _ in counts_of(statistics):
        stored_as = origin[f"{path_name(path)}/batches"]
        if not (source.read(stored_as) > 0).all():
            raise CheckpointError(
                f"{stored_as} is 0: the statistics of activations are of no batch. "
                f"Gather some with {calibrate}, and save these variables; or, "
                "of a Linen model, by --calibrate (calibrate=)"
            )
