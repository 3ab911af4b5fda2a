"""Serving NNX models from a converted checkpoint."""

from typing import Any

import jax
from flax import nnx

from aqtlite.checkpoint import compatibility, keys, nnx_variables
from aqtlite.checkpoint import sample as sample_lib
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import Reader
from aqtlite.checkpoint.from_nnx import name_of_model
from aqtlite.checkpoint.manifest import Manifest
from aqtlite.checkpoint.names import name_of
from aqtlite.checkpoint.reading import read
from aqtlite.flax.call import Call
from aqtlite.flax.nnx import conversion as nnx_conversion
from aqtlite.flax.nnx.model import QuantizedModel
from aqtlite.flax.nnx.quantize import as_quantized
from aqtlite.program.serving import conversion
from aqtlite.program.serving.frozen_record import COLLECTION, IDENTITY
from aqtlite.program.serving.planning import Plan


def load(
    source: Reader,
    manifest: Manifest,
    model: nnx.Module,
    mesh: jax.sharding.Mesh | None,
    rules: Any,
) -> QuantizedModel:
    """Makes a serving model of a model and a checkpoint.

    Args:
        source: the checkpoint.
        manifest: manifest of the checkpoint.
        model: as it was converted, with floats or shapes. It stays as it is.
        mesh: as `load_serving` takes it.
        rules: logical axis rules, as `load_serving` takes them.

    Raises:
        CheckpointError: as `load_serving` does.
    """
    given = as_quantized(model)
    serving, plan = _abstract(manifest, given, str(source.path))
    shardings = {} if mesh is None else _shardings(serving, mesh, rules)
    theirs: dict[str, Any] = {}
    nnx_variables.with_leaves(given, lambda name, x, _: theirs.setdefault(name, x))
    missing: list[str] = []

    def value(name: str, leaf: Any, variable: Any) -> Any:
        del variable
        if name not in manifest.arrays:
            if isinstance(theirs[name], jax.ShapeDtypeStruct):
                missing.append(name)
            return theirs[name]
        x = read(source, manifest, name, shardings)
        return keys.as_key(x, leaf) if keys.is_key(leaf) else x

    loaded = nnx_variables.with_leaves(serving, value)
    if missing:
        raise CheckpointError(
            f"{source.path} has no values for the rngs and caches "
            f"{', '.join(missing[:5])}, and neither has the model: give load_serving a "
            "model that has them, or convert a checkpoint that does"
        )
    plan.model.fix_scales(loaded)
    return loaded


def _abstract(
    manifest: Manifest, given: QuantizedModel, where: str
) -> tuple[QuantizedModel, Plan]:
    """Plans the serving model as shapes, and checks that a checkpoint holds it.

    Raises:
        CheckpointError: if it does not.
    """
    if given.aqt.frozen:
        raise CheckpointError(
            "load_serving takes the model as it was converted, and this one is "
            "converted already"
        )
    args, kwargs = sample_lib.decode(manifest.sample)
    frozen = compatibility.frozen_paths(manifest)
    missing = nnx_variables.made_by_serving(given)
    shapes = nnx_variables.as_shapes(given, compatibility.stored_dtypes(manifest))
    try:
        plan = nnx_conversion.plan(shapes, [Call(*args, **kwargs)])
        paths = [weight.path for weight in plan.weights]
        # Checkpoints that were converted earlier have no samples.
        missing.update(name_of((COLLECTION, *path[:-1], IDENTITY)) for path in paths)
        floats = [one for one in paths if name_of((COLLECTION, *one)) not in frozen]
        serving = conversion.serving(plan.keep_float(floats))
    except (TypeError, ValueError) as error:
        name = name_of_model(given)
        raise compatibility.another_model(where, manifest, name, error) from error
    without = frozenset(missing - manifest.arrays.keys())
    compatibility.check(manifest, nnx_variables.tree_of(serving, without), where)
    nnx_variables.keep_samples(serving, manifest.arrays)
    return serving, plan


def _shardings(
    serving: QuantizedModel, mesh: jax.sharding.Mesh, rules: Any
) -> dict[str, jax.sharding.Sharding]:
    """Shardings of the arrays by the model's own partitioning."""
    with nnx.logical_axis_rules(rules or ()):
        return {
            name: jax.sharding.NamedSharding(mesh, spec)
            for name, spec in nnx_variables.specs_of(serving).items()
        }
