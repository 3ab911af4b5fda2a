"""Variables of NNX models, matched by name with the arrays of checkpoints."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from aqtlite.checkpoint import arrays as arrays_lib
from aqtlite.checkpoint import nnx_names
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import Reader
from aqtlite.checkpoint.manifest import NNX, Manifest, info_of
from aqtlite.checkpoint.names import name_of, path_name, steps_of
from aqtlite.checkpoint.variables import (
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
from aqtlite.flax.linen.frozen_kernel import FrozenKernel
from aqtlite.flax.nnx.calibrate import calibrate_in_float
from aqtlite.flax.nnx.convert import plan
from aqtlite.flax.nnx.model import (
    ATTRIBUTE,
    ATTRIBUTES,
    QuantizedModel,
    is_weight,
)
from aqtlite.flax.nnx.pure import PureCall
from aqtlite.flax.nnx.quantize import as_quantized, init_state
from aqtlite.jaxpr import tracing
from aqtlite.program.serving.frozen_parameter import FrozenParameter
from aqtlite.program.serving.frozen_record import COLLECTION, IDENTITY, RECORD
from aqtlite.program.serving.model import Buffer
from aqtlite.program.serving.planning import Plan
from aqtlite.quantization.states.state_collections import ADAPTER, STATISTICS

_FROZEN = "frozen"
_MADE_BY_SERVING = (nnx.RngState, nnx.Cache)
"""Types of the variables that a float checkpoint may lack."""


class NnxVariables(Variables):
    """The variables of an NNX model, concrete or abstract. The model is not modified.

    A source may name variables by their paths in the model or as a conversion does,
    with or without a last step "value".
    """

    framework = NNX
    collection = nnx_names.MODEL
    calibrate = "aqtlite.flax.nnx.calibrate"

    def __init__(
        self, model: nnx.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ):
        super().__init__(as_quantized(model), args, kwargs)

    @property
    def name(self) -> str:
        return type(self.model).__name__

    def match(self, source: Reader) -> tuple[QuantizedModel, dict[str, str]]:
        steps = {step for name in source.arrays for step in steps_of(name)[:2]}
        self._keep_adapters_of(source.arrays)
        if not steps.isdisjoint(ATTRIBUTES.values()):
            self._add_states()
        leaves = nnx_names.leaves_of(self.model)
        arrays = source.arrays
        present = {*arrays, *source.others}
        places = _places(leaves, present)
        may_lack = self._may_lack()
        origin: dict[str, str] = {}
        wrong: list[str] = []
        for name, leaf in leaves.items():
            place = places[name]
            if place in present:
                origin[name] = place
            if place in present or name not in may_lack:
                wrong += differences(source, place, info_of(nnx_names.as_stored(leaf)))
        strangers = unknown(source, origin.values())
        if any(_FROZEN in name.split("/")[:2] for name in strangers):
            raise CheckpointError(
                "the source holds frozen weights already ('frozen'); convert the float "
                "checkpoint of training"
            )
        refuse(wrong + strangers, lambda: _advice(leaves, arrays))
        dtypes = {name: arrays[place].dtype for name, place in origin.items()}
        template = nnx_names.as_shapes(self.model, dtypes)
        self._check_traces(template)
        return template, origin

    def _may_lack(self) -> set[str]:
        """Names of the variables that a checkpoint may lack: rngs and caches."""
        return {
            name
            for steps, variable, value in nnx_names.variables(self.model)
            if isinstance(variable, _MADE_BY_SERVING)
            for name in nnx_names.named(steps, value)
        }

    def stored(self, manifest: Manifest) -> QuantizedModel:
        if self.model.aqt.frozen:
            raise CheckpointError(
                "load_serving takes the model as it was converted, and this one is "
                "converted already"
            )
        # Also where only the conversion reads them, so that they are not stored.
        self._add_states()
        self._keep_adapters_of(manifest.arrays)
        return nnx_names.as_shapes(self.model, manifest.source_dtypes())

    def statistics(self, template: QuantizedModel) -> dict[str, Any]:
        return {ATTRIBUTES[STATISTICS]: template.aqt.statistics}

    def gather(
        self, values: QuantizedModel, batches: Iterable[Any]
    ) -> dict[str, np.ndarray]:
        model = nnx.clone(values)
        calibrate_in_float(model, batches, **self.kwargs)
        first = ATTRIBUTES[STATISTICS]
        return {
            name: np.asarray(leaf)
            for name, leaf in nnx_names.leaves_of(model).items()
            if steps_of(name)[0] == first
        }

    def _add_states(self) -> None:
        """Adds states of calibrations to a model that has some and was given none."""
        if _has_states(self.model):
            return
        call, inputs = tracing.close_over_constants(
            lambda args, kwargs: (args, kwargs),
            (self.args, self.kwargs),
            tracing.is_array,
        )

        def with_states(model: QuantizedModel, inputs: Any) -> QuantizedModel:
            args, kwargs = call(inputs)
            init_state(model, *args, **kwargs)
            model.aqt.use_running_average = True
            return model

        initial = nnx.eval_shape(with_states, self.model, inputs)
        if _has_states(initial):
            self.model = initial

    def _keep_adapters_of(self, names: Iterable[str]) -> None:
        """Leaves out the adapters of the model, unless there are arrays of some.

        A base without adapters is converted, and adapters are made beside it.
        """
        if not any(ADAPTER in steps_of(name)[:-1] for name in names):
            self.model = nnx.clone(self.model, variables=False)
            self.model.aqt.remove_adapters()

    def _check_traces(self, template: QuantizedModel) -> None:
        """Raises CheckpointError if the model itself raises with the sample inputs."""
        kwargs = dict(self.kwargs)
        method = kwargs.pop("method", "__call__")
        call = PureCall(template, method, self.args, kwargs)
        with tracing_with(self.model, self.args, self.kwargs):
            tracing.trace(call.function, call.arguments)

    def plan(self, template: QuantizedModel) -> Plan:
        return plan(template, [Call(*self.args, **self.kwargs)])

    def params(self, plan: Plan, names: Collection[str]) -> list[str]:
        del names
        return [name_of((nnx_names.MODEL, *one.path)) for one in plan.model.parameters]

    def buffer(self, buffer: Buffer) -> str:
        collection, *below = buffer.key_path
        return "/".join((ATTRIBUTES[collection.key], path_name(below)))

    def tree_of(
        self, serving: QuantizedModel, names: Collection[str]
    ) -> dict[str, Any]:
        return _tree_of(serving, self._may_lack().difference(names))

    def without_samples(
        self, serving: QuantizedModel, tree: Any, names: Collection[str]
    ) -> QuantizedModel:
        del tree
        _keep_samples(serving, names)
        return serving

    def shardings(
        self, serving: QuantizedModel, mesh: jax.sharding.Mesh, rules: Any
    ) -> dict[str, jax.sharding.Sharding]:
        found: dict[str, jax.sharding.Sharding] = {}
        with nnx.logical_axis_rules(rules or ()):
            for steps, variable, value in nnx_names.variables(serving):
                specs = nnx_names.value_of(nnx.get_partition_spec(variable))
                leaves = jax.tree.leaves(jax.tree.broadcast(specs, value))
                for name, spec in zip(
                    nnx_names.named(steps, value), leaves, strict=True
                ):
                    found[name] = jax.sharding.NamedSharding(mesh, spec)
        return found

    def filled(
        self,
        template: QuantizedModel,
        names: Collection[str],
        read: Callable[[str], Any],
        shardings: Mapping[str, jax.sharding.Sharding],
    ) -> QuantizedModel:
        own = nnx_names.leaves_of(self.model)
        missing: list[str] = []

        def value(name: str, leaf: Any) -> Any:
            if name in names:
                x = read(name)
                return arrays_lib.as_key(x, leaf) if arrays_lib.is_key(leaf) else x
            if name not in own:  # The marker of a frozen parameter.
                return jnp.zeros(leaf.shape, leaf.dtype, device=shardings.get(name))
            if isinstance(own[name], jax.ShapeDtypeStruct):
                missing.append(name)
            return own[name]

        filled = nnx_names.with_leaves(template, value)
        if missing:
            raise CheckpointError(
                "the checkpoint has no values for the rngs and caches "
                f"{', '.join(missing[:5])}, and neither has the model: make it with "
                "them, not in nnx.eval_shape, or take a checkpoint that has them"
            )
        return filled


def _has_states(model: QuantizedModel) -> bool:
    return any(getattr(model.aqt, state) for state in ATTRIBUTES.values())


def _tree_of(model: QuantizedModel, without: Collection[str]) -> dict[str, Any]:
    """Returns the variables of a serving model in the tree structure of checkpoints.

    Frozen weights are in "aqt", by the path of the module and the name of the
    parameter; everything else is at its path in the model.

    Args:
        model: abstract serving model.
        without: names of the variables that the checkpoint lacks.
    """
    nodes: dict[tuple[str, ...], Any] = {}
    for steps, variable, value in nnx_names.variables(model):
        if is_weight(variable):
            nodes[steps] = value
            nodes[(*steps[:-1], RECORD)] = variable.get_metadata(RECORD)
            continue
        if isinstance(value, FrozenParameter):
            static = value.shape, value.dtype, value.number, value.sliced
            nodes[steps] = FrozenKernel(*static, marker=value.marker)
            continue
        for name, x in nnx_names.named(steps, value).items():
            if name not in without:
                nodes[steps_of(name)] = nnx_names.as_stored(x)
    return traverse_util.unflatten_dict(nodes)


def _keep_samples(model: QuantizedModel, names: Collection[str]) -> None:
    """Removes the samples of parameters that are not among `names`, in place."""
    kept = {}
    for module, samples in model.aqt.samples.items():
        inside = module.split("/") if module else ()
        of_module = {
            name: sample
            for name, sample in samples.items()
            if name_of((COLLECTION, *inside, name, IDENTITY)) in names
        }
        if of_module:
            kept[module] = of_module
    model.aqt.samples = nnx.data(kept)


def _places(leaves: Collection[str], present: Collection[str]) -> dict[str, str]:
    """Maps names of variables to names in a source, by the spelling that fits best."""
    return max(
        (dict(zip(leaves, named, strict=True)) for named in _spellings(leaves)),
        key=lambda places: sum(place in present for place in places.values()),
    )


def _spellings(leaves: Collection[str]) -> list[list[str]]:
    """The names of variables in each of the spellings that checkpoints use.

    Names are paths in the model, or those that a conversion writes; both with or
    without the last step "value" that an `nnx.State` of variables has.
    """
    ways = []
    for names in ([_path_of(name) for name in leaves], list(leaves)):
        ways += [names, [f"{name}/value" for name in names]]
    return ways


def _path_of(name: str) -> str:
    """The path in the training model of the variable of a name."""
    first, _, below = name.partition("/")
    return below if first == nnx_names.MODEL else f"{ATTRIBUTE}/{name}"


def _advice(
    leaves: Mapping[str, Any], arrays: Mapping[str, arrays_lib.ArrayInfo]
) -> str:
    """Error-message advice: what a source lacks, or its subtrees with variables."""
    lacking = {*_places(leaves, {*arrays}).values()} - {*arrays}
    if lacking and all(place.startswith(f"{ATTRIBUTE}/") for place in lacking):
        return advice_to_start("aqtlite.flax.nnx.init_state(model, x)")
    shapes = [info_of(nnx_names.as_stored(leaf)).shape for leaf in leaves.values()]
    for names in _spellings(leaves):
        wanted = dict(zip(names, shapes, strict=True))
        found = subtrees_of(wanted, arrays)[:4]
        if found:
            return advice_of([f"--subtree {path}" for path in found])
    return ""
