"""Traced calls of Linen models that are quantized by rules."""

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from flax import core as flax_core
from flax import linen as nn

from aqtlite.flax.call import Call
from aqtlite.flax.linen import given_variables, state_entries
from aqtlite.flax.linen.frozen_kernel import FrozenKernel
from aqtlite.flax.linen.state_entries import entry_of, states_of
from aqtlite.flax.linen.tools import adapter_axes, cache
from aqtlite.jaxpr import tracing
from aqtlite.jaxpr.replacement import Aux, Location, Replacement
from aqtlite.program import calibration_state as states_lib
from aqtlite.program import noise_seeds, plan_checks, served
from aqtlite.program import plan as planning
from aqtlite.program.adapters import adapter_init, merging
from aqtlite.program.adapters.merging import MergeReport
from aqtlite.program.modules import flax_models
from aqtlite.program.plan import Plan
from aqtlite.program.planned_lookup import Planned, PlannedLookup
from aqtlite.program.program import Path, Program
from aqtlite.program.rules.rules import Rule
from aqtlite.program.serving import guards, statistics_uses
from aqtlite.program.serving.frozen_record import (
    COLLECTION,
    FrozenEntry,
    frozen_entries,
)
from aqtlite.quantization.states.state_collections import (
    ADAPTER,
    PARAMETERS,
    STATISTICS,
)
from aqtlite.quantization.states.statistics import States

_WITH_WEIGHTS = "aqtlite.flax.with_initial_adapters(model, variables, *args)"


@dataclasses.dataclass(frozen=True)
class ModelByRules:
    """A Linen model and the rules that quantize its contractions."""

    model: nn.Module
    rules: tuple[Rule, ...]
    strict: bool = False
    """Whether it is an error if floats are contracted in float without a rule."""

    invariant: bool = False
    """Whether bits depend on values alone, as by `aqtlite.invariant`."""


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """A traced call of a quantized model."""

    program: Program
    values: tuple[Any, ...]
    """Inputs of its jaxpr; a `FrozenKernel` for each frozen parameter."""

    variables: Mapping[str, Any]
    updates: bool
    """Whether statistics are updated, and returned with the changed variables."""

    names_statistics: bool
    """Whether `mutable` names the collection of statistics, and not all collections."""

    is_mutable: bool
    """Whether the call returns a pair of its result and the changed variables."""

    key: jax.Array | None
    """Key of stochastic rounding, of the rng stream "aqt"; None without one."""

    @classmethod
    def of(
        cls, quantized: ModelByRules, variables: Mapping[str, Any], call: Call
    ) -> "TracedCall":
        """Traces a call and plans its contractions."""
        kwargs = dict(call.kwargs)
        mutable = kwargs.pop("mutable", False)

        def apply(variables: Any, args: Any, kwargs: Any) -> Any:
            return quantized.model.apply(variables, *args, mutable=mutable, **kwargs)

        guards.check_restored(variables.get(COLLECTION, {}))
        shapes, values = without_kernels(variables)
        given = jax.tree.leaves(values, is_leaf=_is_kernel)
        if mutable is not False and any(map(_is_kernel, given)):
            # Frozen parameters cannot be returned.
            mutable = flax_core.scope.subtract_filters(mutable, PARAMETERS)
        traced = flax_models.trace(apply, (shapes, call.args, kwargs))
        given += jax.tree.leaves((call.args, kwargs))
        is_mutable = mutable is not False
        named = {mutable} if isinstance(mutable, str) else mutable
        program = program_of(quantized, traced, shapes)
        rngs = kwargs.get("rngs")
        keys = rngs if isinstance(rngs, Mapping) else {}
        program = dataclasses.replace(program, dropout=keys.get("dropout"))
        return cls(
            program,
            tuple(given[i] for i in traced.leaves),
            variables,
            is_mutable and flax_core.scope.in_filter(mutable, STATISTICS),
            isinstance(named, Collection) and STATISTICS in named,
            is_mutable,
            keys.get(COLLECTION),
        )

    def init_states(self) -> dict[str, Any]:
        """Returns the states before the first call, by collection and path."""
        states: dict[str, Any] = {}
        boxed = adapter_axes.boxing(self.program, self.variables)
        adapter_init.check_keeps_weights(self.program, _WITH_WEIGHTS)
        started = adapter_init.start(
            self.program, self.values, self._frozen(), guards.LINEN
        )
        for one, collection, entry in states_lib.init(
            self.program, self.values, started.adapters
        ):
            if ADAPTER in entry:
                entry = {**entry, ADAPTER: boxed(one, entry[ADAPTER])}
            place = self.program.place_of(one)
            if collection == PARAMETERS:
                params = state_entries.found_at(self.variables, collection, place[:-1])
                state_entries.check_mapped(one, entry, params)
            state_entries.put(states, collection, place, entry)
        return states

    def init_adapters(self) -> dict[str, Any]:
        """Returns the initial parameters of adapters, nested by path."""
        adapter_init.check_keeps_weights(self.program, _WITH_WEIGHTS)
        return self.started()[0]

    def started(self) -> tuple[dict[str, Any], dict[Path, jax.Array]]:
        """Returns the initial adapters, nested by path, and changed parameters."""
        started = adapter_init.start(
            self.program, self.values, self._frozen(), guards.LINEN
        )
        parameters = self.program.parameters
        changed = {parameters[i].path: x for i, x in started.changed.items()}
        states: dict[str, Any] = {}
        boxed = adapter_axes.boxing(self.program, self.variables)
        for one in self.program.plan.replaced():
            if one.adapter is not None:
                entry = {ADAPTER: boxed(one, started.adapters[one.site.location])}
                state_entries.put(states, PARAMETERS, self.program.place_of(one), entry)
        return states.get(PARAMETERS, {}), changed

    def merged(self) -> tuple[dict[Path, jax.Array], MergeReport]:
        """Returns the parameters with adapters merged, by path, and what changed."""
        frozen = self._frozen()
        changed, report = merging.merge(self.program, self.values, frozen, guards.LINEN)
        parameters = self.program.parameters
        return {parameters[i].path: x for i, x in changed.items()}, report

    def lacking(self) -> frozenset[str]:
        """Returns the collections that lack states of some contraction."""
        return frozenset(
            collection
            for one in self.program.plan.replaced()
            for collection, fields in one.collections.items()
            if set(fields)
            - set(entry_of(self.variables, collection, self.program.place_of(one)))
        )

    def check_not_serving(self) -> None:
        """Raises ValueError if the call names statistics to gather, and serves."""
        gathers = any(STATISTICS in x.collections for x in self.program.plan.replaced())
        if self.names_statistics and gathers:
            given = self.variables.get(STATISTICS)
            states_lib.check_not_serving(given, has_frozen=self.serves)

    @property
    def serves(self) -> bool:
        """Whether weights are frozen."""
        return COLLECTION in self.variables or any(map(_is_kernel, self.values))

    def run(self) -> Any:
        """Evaluates the call."""
        if self.serves:
            plan_checks.check_quantizes(self.program.plan)
            self.check_not_serving()
            aux: Aux = {}
            frozen = self._frozen()
            outputs = served.serve(self.program, self.values, frozen, guards.LINEN)
        else:
            how = states_lib.updating if self.updates else self._contracting
            seeded = noise_seeds.seeded(how, self.key)
            outputs, aux = self.program.evaluate(self.values, seeded)
        return self._result(outputs, aux)

    def _contracting(self, one: Planned, states: States) -> Replacement:
        """Returns a replacement that also records the use of statistics."""
        made = one.replacement(states)
        if isinstance(one, PlannedLookup):
            return made

        def function(values: Sequence[Any], states: States) -> tuple[Any, Any]:
            call = self.program.contraction(one, values, states)
            statistics_uses.note_operands(
                call, self.program.place_of(one), needs_frozen=False
            )
            return made.function(values, states)

        return dataclasses.replace(made, function=function)

    def gather(self) -> Any:
        """Evaluates the call in float, and updates statistics."""
        self.check_not_serving()
        return self._result(*self.program.evaluate(self.values, states_lib.gathering))

    def _result(self, outputs: Sequence[Any], aux: Aux) -> Any:
        """Returns the result of the call, with statistics if it updates any."""
        out = jax.tree.map(lambda i: outputs[i], self.program.traced.outputs)
        if self.is_mutable:
            cache.check_room(out[1].get(cache.COLLECTION))
        if not self.updates:
            return out
        after: dict[str, Any] = {}
        for one, collection, entry in states_lib.left(self.program.plan, aux):
            if collection == STATISTICS:
                state_entries.put(after, STATISTICS, self.program.place_of(one), entry)
        result, changed = out
        return result, state_entries.merged(flax_core.unfreeze(changed), after)

    def _frozen(self) -> dict[Path, list[FrozenEntry]]:
        found: dict[Path, list[FrozenEntry]] = {}
        for one in frozen_entries(self.variables.get(COLLECTION, {})):
            if isinstance(one.record.identity, str):
                one = one._replace(values=nn.meta.unbox(one.values))
                found.setdefault(one.module, []).append(one)
        return found


def program_of(
    quantized: ModelByRules, traced: tracing.Traced, variables: Mapping[str, Any]
) -> Program:
    """Plans the contractions of a traced call of a model.

    Args:
        quantized: the model and its rules.
        traced: the call, with the variables as first argument.
        variables: variables of the model, with shapes for kernels frozen by rules.
    """
    params = variables.get(PARAMETERS, {})
    parameters = given_variables.parameters_in(traced, variables)
    names = {i: str(one) for i, one in parameters.items()}
    planned = planning.make(traced.jaxpr, quantized.rules, names)
    plan_checks.report(planned, strict=quantized.strict)
    if quantized.invariant:
        planned = planned.invariant(traced.jaxpr)
    roots = {quantized.model.name, type(quantized.model).__name__}
    modules = {
        one.site.location: _module(one, roots, params) for one in planned.every()
    }
    found = _numbered_entries(planned, modules)
    return Program(
        traced,
        planned,
        parameters,
        module_of=lambda one: modules[one.site.location],
        state=variables,
        states_in=lambda one, state: states_of(state, one, found[one.path]),
        place_of=lambda one: found[one.path],
    )


def _module(one: Planned, roots: set[str | None], params: Any) -> Path:
    """Returns the path of the module that makes a contraction or lookup.

    A scope consists of the name of the root, the names of modules, and names from
    `jax.named_scope` and `jnp.einsum`. A method other than ``__call__`` is appended to
    its module's name with a dot; if another method of the module calls it, the module
    is in the scope twice. Names without an entry in the parameters are left out.
    """
    names = [name.partition(".")[0] or name for name in one.kept_under.split("/")]
    if names and names[0] in roots:
        names = names[1:]
    path: list[str] = []
    for name in names:
        if isinstance(params, Mapping) and name in params:
            params = params[name]
            path.append(name)
    return tuple(path)


def _numbered_entries(
    planned: Plan, modules: Mapping[Location, Path]
) -> dict[str, Path]:
    """Returns the path of the states of each contraction, by the contraction's path."""
    counts: collections.Counter[Path] = collections.Counter()
    found = {}
    for one in planned.replaced():
        name = one.operation_name
        path = (*modules[one.site.location], name)
        number, counts[path] = counts[path], counts[path] + 1
        found[one.path] = (*path[:-1], f"{name}_{number}") if number else path
    return found


def _steps(path: tuple[Any, ...]) -> Path:
    return tuple(str(getattr(key, "key", key)) for key in path)


def _is_kernel(x: Any) -> bool:
    return isinstance(x, FrozenKernel)


def without_kernels(
    variables: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns variables to trace with, and variables to take the inputs from.

    In the first, shapes replace the `FrozenKernel`s of weights that rules froze; in the
    second, these kernels stay. Kernels of injected contractions stay in the first, for
    the contractions to find, and the second has their markers. A kernel with no weight
    counts as frozen by rules, which report its name.
    """
    others = {k: v for k, v in variables.items() if k != COLLECTION}
    injected = [
        (one.module, one.record)
        for one in frozen_entries(variables.get(COLLECTION, {}))
        if not isinstance(one.record.identity, str)
    ]
    if injected:
        others[COLLECTION] = variables[COLLECTION]

    def is_injected(path: Any) -> bool:
        return any(one.is_made_of(module, _steps(path)) for module, one in injected)

    def as_shape(path: Any, node: Any) -> Any:
        return node.struct if _is_kernel(node) and not is_injected(path) else node

    def as_leaf(path: Any, node: Any) -> Any:
        return node.marker if _is_kernel(node) and is_injected(path) else node

    params = variables.get(PARAMETERS, {})
    shapes = jax.tree.map_with_path(as_shape, params, is_leaf=_is_kernel)
    values = jax.tree.map_with_path(as_leaf, params, is_leaf=_is_kernel)
    return {**others, PARAMETERS: shapes}, {**others, PARAMETERS: values}
