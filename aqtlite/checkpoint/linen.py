"""Variables of Linen models, matched by name with the arrays of checkpoints."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import errors as flax_errors
from flax import linen as nn

from aqtlite.checkpoint.arrays import ArrayInfo
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import Reader
from aqtlite.checkpoint.manifest import LINEN, Manifest, info_of
from aqtlite.checkpoint.names import path_name, steps_of
from aqtlite.checkpoint.variables import (
    PARAMS,
    Variables,
    advice_of,
    advice_to_start,
    differences,
    refuse,
    subtrees_of,
    tracing_with,
    unknown,
)
from aqtlite.flax.call import Call
from aqtlite.flax.linen import convert as linen_convert
from aqtlite.flax.linen.tools.adapters import without_adapters
from aqtlite.flax.linen.tools.calibrate import calibrate_in_float
from aqtlite.jaxpr import tracing
from aqtlite.program.serving.frozen_record import COLLECTION
from aqtlite.program.serving.model import Buffer
from aqtlite.program.serving.placeholder import Placeholder, is_placeholder, with_zeros
from aqtlite.program.serving.planning import Plan
from aqtlite.quantization.states.state_collections import ADAPTER, STATISTICS


class LinenVariables(Variables):
    """The variables of a Linen module, or of the result of `quantize_model`.

    The source may hold all variables, or only the collection "params". A parameter that
    the model boxes (`nn.with_partitioning`) may be unboxed in the source.
    """

    framework = LINEN
    collection = PARAMS
    calibrate = "aqtlite.flax.calibrate"

    @property
    def name(self) -> str:
        return repr(self.model)

    def match(self, source: Reader) -> tuple[dict[str, Any], dict[str, str]]:
        arrays = source.arrays
        template = _with_adapters_of(arrays, self.initial())
        if any(name.startswith(f"{COLLECTION}/") for name in arrays):
            raise CheckpointError(
                f"the source holds frozen weights already (collection '{COLLECTION}'); "
                "convert the float checkpoint of training"
            )
        has_collections = any(name.startswith(f"{PARAMS}/") for name in arrays)
        # Serving creates the collections that the source lacks, such as "cache".
        found = {
            name: value
            for name, value in template.items()
            if name == PARAMS or any(array.startswith(f"{name}/") for array in arrays)
        }
        without_boxes = _names_without_boxes(found)
        origin: dict[str, str] = {}
        wrong: list[str] = []

        def look_up(key_path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
            name = path_name(key_path)
            boxed, unboxed = (
                n if has_collections else n.removeprefix(f"{PARAMS}/")
                for n in (name, without_boxes[name])
            )
            found_as = boxed if boxed in arrays else unboxed
            origin[name] = found_as
            wrong.extend(differences(source, found_as, info_of(leaf)))
            dtype = arrays[found_as].dtype if found_as in arrays else leaf.dtype
            return jax.ShapeDtypeStruct(leaf.shape, dtype)

        variables = jax.tree.map_with_path(look_up, found)
        wrong += unknown(source, origin.values())
        refuse(wrong, lambda: _advice(template, arrays))
        return variables, origin

    def initial(self) -> dict[str, Any]:
        """Traces the model's `init` for the shapes of its float variables.

        Raises:
            CheckpointError: if the model raises.
        """

        def init(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # `apply` has these arguments, `init` has not.
            of_init = {k: v for k, v in kwargs.items() if k not in ("mutable", "rngs")}
            return self.model.init(jax.random.key(0), *args, **of_init)

        flat, inputs = tracing.close_over_constants(
            init, (self.args, self.kwargs), tracing.is_array
        )
        with tracing_with(self.model, self.args, self.kwargs):
            shapes = jax.eval_shape(flat, inputs)
        return {name: value for name, value in shapes.items() if name != COLLECTION}

    def stored(self, manifest: Manifest) -> dict[str, Any]:
        dtypes = manifest.source_dtypes()
        # Statistics that only the conversion reads are not stored.
        collections = {path.split("/")[0] for path in manifest.nodes} | {STATISTICS}
        initial = _with_adapters_of(manifest.arrays, self.initial())
        kept = {k: value for k, value in initial.items() if k in collections}
        return jax.tree.map_with_path(
            lambda key, leaf: jax.ShapeDtypeStruct(
                leaf.shape, dtypes.get(path_name(key), leaf.dtype)
            ),
            kept,
        )

    def statistics(self, template: dict[str, Any]) -> dict[str, Any]:
        return {STATISTICS: template.get(STATISTICS)}

    def gather(self, values: Any, batches: Iterable[Any]) -> dict[str, np.ndarray]:
        with self._has_collections(values):
            gathered = calibrate_in_float(self.model, values, batches, **self.kwargs)
        named = jax.tree.leaves_with_path({STATISTICS: gathered[STATISTICS]})
        return {path_name(path): np.asarray(x) for path, x in named}

    def plan(self, template: dict[str, Any]) -> Plan:
        call = Call(*self.args, **self.kwargs)
        with self._has_collections(template):
            return linen_convert.plan(self.model, template, [call])

    @contextlib.contextmanager
    def _has_collections(self, variables: Mapping[str, Any]) -> Iterator[None]:
        """Turns Flax's error about a missing collection into advice.

        Args:
            variables: variables of the call inside the context.

        Raises:
            CheckpointError: if the call reads a collection that they lack.
        """
        try:
            yield
        except flax_errors.ScopeCollectionNotFound as error:
            missing = [name for name in self.initial() if name not in variables]
            if not missing:
                raise
            wanted = " ".join(f"--subtree {name}" for name in (*variables, *missing))
            raise CheckpointError(
                f"the model reads collections that the source lacks: it holds "
                f"{', '.join(variables)}, and the model's others are "
                f"{', '.join(missing)}. Where they are in subtrees, name each: {wanted}"
            ) from error

    def params(self, plan: Plan, names: Collection[str]) -> list[str]:
        in_tree = [name for name in names if name.startswith(f"{PARAMS}/")]
        numbers = (one.number for one in plan.model.parameters)
        by_number = dict(zip(numbers, in_tree, strict=True))
        return [by_number[number] for number in sorted(by_number)]

    def buffer(self, buffer: Buffer) -> str:
        return path_name(buffer.key_path)

    def tree_of(self, serving: Any, names: Collection[str]) -> Any:
        del names
        return serving

    def without_samples(self, serving: Any, tree: Any, names: Collection[str]) -> Any:
        del serving, names
        return tree

    def shardings(
        self, serving: Any, mesh: jax.sharding.Mesh, rules: Any
    ) -> dict[str, jax.sharding.Sharding]:
        specs = nn.get_partition_spec(serving)
        if rules is not None:
            specs = nn.logical_to_mesh(specs, rules)
        tree = jax.tree.map(
            lambda spec: jax.sharding.NamedSharding(mesh, spec),
            specs,
            is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec),
        )
        names = [path_name(key) for key, _ in jax.tree.leaves_with_path(serving)]
        return dict(zip(names, jax.tree.leaves(tree), strict=True))

    def filled(
        self,
        template: Any,
        names: Collection[str],
        read: Callable[[str], Any],
        shardings: Mapping[str, jax.sharding.Sharding],
    ) -> Any:
        del names

        def value(key_path: Any, node: Any) -> Any:
            if isinstance(node, Placeholder):
                (below, _), *_ = jax.tree.leaves_with_path(node)
                return with_zeros(node, shardings.get(path_name((*key_path, *below))))
            return read(path_name(key_path))

        return jax.tree.map_with_path(value, template, is_leaf=is_placeholder)


def _with_adapters_of(
    names: Iterable[str], variables: dict[str, Any]
) -> dict[str, Any]:
    """Returns variables without adapters, unless there are arrays of some.

    A base without adapters is converted, and adapters are made beside it.
    """
    if any(ADAPTER in steps_of(name)[:-1] for name in names):
        return variables
    return {**variables, PARAMS: without_adapters(variables[PARAMS])}


def _advice(template: Mapping[str, Any], arrays: Mapping[str, ArrayInfo]) -> str:
    """Error-message advice: what a source lacks, or its subtrees with parameters."""
    params = {PARAMS: template[PARAMS]}
    names = _names_without_boxes(params).values()
    present = {*arrays, *(f"{PARAMS}/{name}" for name in arrays)}
    lacking = [name for name in names if name not in present]
    if lacking and all("/aqt_" in name for name in lacking):
        return advice_to_start(
            "_, made = model.apply(variables, x, mutable=['params'])"
        )
    wanted = {
        name.removeprefix(f"{PARAMS}/"): info_of(leaf).shape
        for name, leaf in zip(names, jax.tree.leaves(params), strict=True)
    }
    found = subtrees_of(wanted, arrays)[:4]
    return advice_of([" ".join(_options(path, template, arrays)) for path in found])


def _options(
    path: str, template: Mapping[str, Any], names: Collection[str]
) -> list[str]:
    """Command-line options that select parameters and the collections beside them."""
    above, slash, last = path.rpartition("/")
    collections = [
        f"{above}{slash}{collection}"
        for collection in template
        if collection != PARAMS
        and last == PARAMS
        and any(name.startswith(f"{above}{slash}{collection}/") for name in names)
    ]
    return [f"--subtree {one}" for one in (path, *collections)]


def _names_without_boxes(variables: Any) -> dict[str, str]:
    """Maps the name of each leaf to its name in a tree without boxes."""
    names: dict[str, str] = {}
    for path, node in jax.tree.leaves_with_path(
        variables, is_leaf=nn.meta.is_axis_metadata
    ):
        below = [sub for sub, _ in jax.tree.leaves_with_path(node)]
        for sub in below:
            outside = path if len(below) == 1 else (*path, *sub)
            names[path_name((*path, *sub))] = path_name(outside)
    return names
