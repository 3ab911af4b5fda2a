"""The compiled programs of a subject, with a switch for each contraction."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress
from absl import logging

from aqtlite import errors
from aqtlite.allocation import candidates as candidates_lib
from aqtlite.allocation import conversions, gathering
from aqtlite.allocation.candidates import OWN, Candidates
from aqtlite.allocation.subject import Call, Subject
from aqtlite.allocation.switched import Pass, Switched
from aqtlite.allocation.switches import Given, Switch
from aqtlite.calibration import batches as batches_lib
from aqtlite.jaxpr import tracing
from aqtlite.program import plan as planning
from aqtlite.program import plan_checks
from aqtlite.program.naming import names_of_parameters
from aqtlite.program.plan import Plan
from aqtlite.program.plan_table import NO_CONTRACTIONS
from aqtlite.program.planned_lookup import Planned
from aqtlite.shapes import processes, sharding


class Programs:
    """The compiled programs of a subject: one for each shape of the batches."""

    def __init__(
        self,
        subject: Subject,
        candidates: Candidates | None,
        loss: Callable[..., Any] | None,
        num_inputs: int | None,
        operands: Literal["any", "weight"],
    ):
        """Takes what is measured; `of` traces it.

        Args:
            subject: the model and its variables.
            candidates: the candidates; None for what the model does by itself.
            loss: function of the output of the model and the items of a batch.
            num_inputs: number of items of a batch that are inputs of the model; None
                for all.
            operands: "weight" to switch only contractions that read a weight.

        Raises:
            TypeError: if `loss` is no function, or `num_inputs` no integer.
        """
        if loss is not None and not callable(loss):
            raise TypeError(
                f"loss must be a function or None, got {errors.brief(loss)}"
            )
        if num_inputs is not None and not isinstance(num_inputs, int):
            raise TypeError(
                f"num_inputs must be an integer or None, got {errors.brief(num_inputs)}"
            )
        self._subject, self._candidates = subject, candidates
        self._loss, self._num_inputs = loss, num_inputs
        self._operands = operands
        self._found: dict[Any, Switched] = {}
        self._given: Any = None

    @property
    def names(self) -> list[str]:
        """Names of the candidates."""
        return [OWN] if self._candidates is None else list(self._candidates)

    def checked(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields batches, which may have to be equal in all processes.

        Raises:
            TypeError: if `batches` is no iterable of batches.
            ValueError: if they are not `processes.alike`.
        """
        return processes.alike(batches_lib.check(batches), self._subject.variables)

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        """Returns the items of a batch that are inputs of the model."""
        items = batches_lib.args_of(batch)
        count = self._num_inputs
        if count is not None and not 0 < count <= len(items):
            raise ValueError(
                f"num_inputs={count}, and a batch has {len(items)} items: they are the "
                "arguments of the model, and the rest is for the loss"
            )
        return items[:count]

    @property
    def may_gather(self) -> bool:
        """Whether a candidate may need statistics, before any call is traced."""
        if self._candidates is None and not self._subject.rules:
            return True  # Only a trace shows what is injected.
        of_rules = (self._candidates or {OWN: self._subject.rules}).values()
        cfgs = (rule.cfg for rules in of_rules for rule in rules)
        return any(cfg is not None and gathering.gathers(cfg) for cfg in cfgs)

    def calibrate(self, batches: Sequence[Any]) -> None:
        """Gathers the statistics of candidates, and rounds weights as conversions do.

        Args:
            batches: the batches, of which the float model takes each once.

        Raises:
            ValueError: if a contraction that needs statistics saw no batch.
        """
        switched = self.of(batches[0])
        gathered = jax.jit(lambda: gathering.first(switched.switches))()
        if not gathered:
            return
        console = rich.console.Console(stderr=True)
        for batch in rich.progress.track(
            batches, "calibrating", console=console, disable=not console.is_terminal
        ):
            gathered = self.of(batch).gather(self.values(batch), gathered)
        gathering.check(gathered)
        self._given = conversions.given_of(switched, gathered)
        logging.info("gathered statistics of candidates on %d batches", len(batches))

    def of(self, batch: Any) -> Switched:
        """Returns the program for a batch, traced for the first of its shape.

        Raises:
            ValueError: if there is nothing to quantize.
        """
        key = _shapes_of(batches_lib.args_of(batch))
        if key not in self._found:
            made = self._called(batch)
            before = next(iter(self._found.values()), made)
            if list(map(_kind, before.switches)) != list(map(_kind, made.switches)):
                raise ValueError(
                    "batches of different shapes make the model contract differently: "
                    "give batches of one shape"
                )
            self._found[key] = made
        return self._found[key]

    def _called(self, batch: Any) -> Switched:
        """Traces the model with a batch, and explains what it does not take."""
        try:
            with batches_lib.called_with(batch):
                return self._traced(self.inputs(batch))
        except TypeError as error:
            items = batches_lib.args_of(batch)
            if self._loss is None or self._num_inputs is not None or len(items) == 1:
                raise
            raise TypeError(
                f"the model was given all {len(items)} items of a batch, and raised "
                f"TypeError: {error}. If the last ones, such as labels, are for the "
                "loss, give num_inputs="
            ) from error

    def values(self, batch: Any, *, noise: float | None = None) -> list[Any]:
        """Returns the inputs of the jaxpr for a batch.

        Args:
            batch: the batch.
            noise: signal-to-noise ratio in dB of noise to add to all inputs of floats;
                None for none.
        """
        inputs = self.inputs(batch)
        if noise is not None:
            inputs = jax.tree.map(lambda x: _with_noise(x, noise), inputs)
        return self.of(batch).traced.values((self._subject.call(inputs).args, {}))

    def _traced(self, inputs: tuple[Any, ...]) -> Switched:
        call = self._subject.call(inputs)
        function = call.function
        traced = function.trace(call.args, {})
        names = names_of_parameters(function.params, traced, call.args, {})
        rules = {OWN: self._subject.rules}
        if self._candidates is not None:
            rules = dict(self._candidates)
        plans = {
            name: planning.make(traced.jaxpr, one, names, function.naming).called_with(
                call.args
            )
            for name, one in rules.items()
        }
        self._check(plans)
        switches = self._switches(plans, inputs)
        run = jax.jit(self._function(call, traced, switches))
        gather = jax.jit(
            functools.partial(gathering.after, switches, traced, call.evaluate)
        )
        return Switched(call, traced, plans, tuple(switches), run, gather)

    def _switches(self, plans: Mapping[str, Plan], inputs: Any) -> list[Switch]:
        """Returns the contractions and lookups to switch, of which there are some."""
        quantized = [
            Switch(forms, tuple(plans))
            for forms in _columns(list(plans.values()))
            if any(one.is_quantized for one in forms)
            and (self._operands == "any" or forms[0].reads_weight)
            and 0 not in (*forms[0].lhs.shape, *forms[0].rhs.shape)
        ]
        if not quantized:
            batches_lib.check_not_empty(inputs)
            raise ValueError(NO_WEIGHT)
        found = []
        for one in quantized:
            if "shard_map" in one.forms[0].site.around:
                logging.warning("not measured: %r %s", one.path, _IN_SHARD_MAP)
            else:
                found.append(one)
        if not found:
            raise ValueError(
                f"there is nothing to measure: every contraction {_IN_SHARD_MAP}; "
                "measure the function on one device"
            )
        return found

    def _check(self, plans: Mapping[str, Plan]) -> None:
        for name, plan in plans.items():
            if not plan.contractions:
                raise ValueError(f"nothing to measure: {NO_CONTRACTIONS}")
            if self._candidates is None and not plan.operations():
                raise ValueError(
                    "the model quantizes nothing by itself: give candidates= to "
                    "measure, such as [aqtlite.config.weight_only(bits=4)]"
                )
            plan_checks.check_quantizes(plan)
            candidates_lib.check_not_learned(name, plan)
            given = [errors.label(one.path) for one in plan.every() if one.is_injected]
            if given and self._candidates is not None:
                raise ValueError(
                    f"{', '.join(given[:3])} and others were given configs in the "
                    "model, which candidates do not change: give the model without "
                    "them (cfg=None)"
                )

    def _function(
        self, call: Call, traced: tracing.Traced, switches: Sequence[Switch]
    ) -> Callable[..., Pass]:
        def switched(
            values: Sequence[Any],
            choices: Any,
            is_measured: Any,
            given: Sequence[Sequence[Given]],
            batch: Any,
        ) -> Pass:
            replacements = {
                one.forms[0].site.location: one.replacement(
                    choices[i], is_measured, given[i]
                )
                for i, one in enumerate(switches)
            }
            found, aux = call.evaluate(traced.jaxpr, values, replacements)
            out = call.result(traced.result(found))
            pairs = zip(switches, replacements, strict=True)
            squares = [one.squares(aux[location]) for one, location in pairs]
            signals, noises = zip(*squares, strict=True)
            loss = None if self._loss is None else _loss_of(self._loss, out, batch)
            return Pass(loss, _floats(out), jnp.stack(signals), jnp.stack(noises))

        return switched

    def run(
        self, batch: Any, values: Sequence[Any], choices: Any, *, is_measured: bool
    ) -> Pass:
        """Runs the program.

        Args:
            batch: the batch.
            values: result of `values`.
            choices: an index for each switch, as in `Switch.replacement`.
            is_measured: whether all contractions are float, and their errors measured.
        """
        items = () if self._loss is None else batches_lib.args_of(batch)
        switched, chosen = self.of(batch), np.asarray(choices, np.int32)
        nothing = [[Given()] * len(switched.plans)] * len(switched.switches)
        given = self._given or nothing
        measured = np.bool_(is_measured)
        return switched.run(values, chosen, measured, given, items)


NO_WEIGHT = (
    "no contraction that a candidate quantizes has a weight, an operand that depends "
    "on parameters alone: there are no bytes to save"
)
_IN_SHARD_MAP = "is inside of jax.shard_map, whose body takes no switch"


def _columns(plans: Sequence[Plan]) -> Iterator[tuple[Planned, ...]]:
    """Yields each contraction, then each lookup, as all plans have it.

    A plan without a rule for lookups has none.
    """
    yield from zip(*(plan.contractions for plan in plans), strict=True)
    of_plans = [{one.site.location: one for one in plan.lookups} for plan in plans]
    known = {at: one for lookups in of_plans for at, one in lookups.items()}
    for location, one in known.items():
        yield tuple(lookups.get(location, one.left_float()) for lookups in of_plans)


def _kind(switch: Switch) -> Any:
    return switch.path, switch.is_quantized


def _loss_of(
    loss: Callable[..., Any], outputs: Any, batch: tuple[Any, ...]
) -> jax.Array:
    try:
        inspect.signature(loss).bind(outputs, *batch)
    except ValueError:
        pass  # Not every built-in function has a signature.
    except TypeError as error:
        raise TypeError(
            "loss is called with the outputs of the model and all items of a batch, "
            f"loss(outputs, *batch), here {1 + len(batch)} arguments: {error}"
        ) from error
    value = jnp.asarray(loss(outputs, *batch))
    if value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            "loss(outputs, *batch) must return a scalar float, got "
            f"{sharding.describe(value)}: take the mean over the batch"
        )
    return value.astype(jnp.float32)


def _is_float(x: Any) -> bool:
    return tracing.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)


def _floats(out: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(out) if _is_float(x)]


def has_floats(inputs: Any) -> bool:
    """Whether there are arrays of floats among the inputs of a model."""
    return bool(_floats(inputs))


def _with_noise(x: Any, decibels: float) -> Any:
    """Adds Gaussian noise to an array of floats; returns anything else unchanged."""
    if not _is_float(x):
        return x
    noise = np.random.default_rng(0).standard_normal(x.shape).astype(np.float32)
    root_mean_square = jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))
    noise *= 10 ** (-decibels / 20)
    return (x + root_mean_square * noise).astype(x.dtype)


def _shapes_of(items: tuple[Any, ...]) -> Any:
    leaves, treedef = jax.tree.flatten(items)
    shapes = [
        (jnp.shape(x), str(x.dtype)) if tracing.is_array(x) else x for x in leaves
    ]
    return treedef, tuple(shapes)
