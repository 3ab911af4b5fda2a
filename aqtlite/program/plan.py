"""Decides how rules quantize the contractions of a program."""

import dataclasses
import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console
import rich.text
from jax.extend import core

from aqtlite import config, errors
from aqtlite.contraction.contract import is_product
from aqtlite.invariance import finding
from aqtlite.invariance.finding import Forms
from aqtlite.jaxpr import registry, sites, user_rules
from aqtlite.jaxpr.recognition import lookups as forms_of_lookups
from aqtlite.jaxpr.recognition import opaque, producers, written_products
from aqtlite.jaxpr.sites import NamedValue, Site
from aqtlite.operations.inputs import Matrices
from aqtlite.output import rich_tables
from aqtlite.program import (
    injected,
    lookups,
    obstacles,
    plan_table,
    unsummed,
    visibility,
)
from aqtlite.program.adapters import low_rank
from aqtlite.program.equation import EMPTY, why_not_quantized
from aqtlite.program.gradient_rules import in_rules
from aqtlite.program.naming import (
    Name,
    Naming,
    by_scope,
    names_of_weights,
    numbered,
)
from aqtlite.program.plan_table import NO_CONTRACTIONS
from aqtlite.program.planned import PlannedContraction
from aqtlite.program.planned_lookup import Planned, PlannedLookup
from aqtlite.program.planned_operand import PlannedOperand
from aqtlite.program.rules import matching, unmatched
from aqtlite.program.rules import unseen as unseen_lib
from aqtlite.program.rules.rules import Rule
from aqtlite.program.rules.unseen import Unseen
from aqtlite.program.undecided import undecided
from aqtlite.shapes import processes
from aqtlite.shapes.processes import Devices


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """The decision about every contraction of a program; prints as a table."""

    contractions: tuple[PlannedContraction, ...]
    rules: tuple[Rule, ...]
    named: tuple[NamedValue, ...] = dataclasses.field(compare=False)
    """The named values of the program."""

    unseen: tuple[Unseen, ...] = ()
    """Operations that may multiply floats, and that rules do not enter."""

    lookups: tuple[PlannedLookup, ...] = ()
    """The lookups of rows, if a rule is for any."""

    forms: Forms | None = dataclasses.field(default=None, compare=False)
    """What is evaluated in forms whose bits depend on values alone; None for nothing.
    """

    devices: Devices = dataclasses.field(default=(), compare=False)
    """Those of arguments that span processes, in which the plan is to be alike."""

    def quantized(self) -> tuple[PlannedContraction, ...]:
        """Returns the contractions that are quantized."""
        return tuple(one for one in self.contractions if one.is_quantized)

    def every(self) -> tuple[Planned, ...]:
        """Returns the contractions, then the lookups."""
        return self.contractions + self.lookups

    def operations(self) -> tuple[Planned, ...]:
        """Returns the contractions, then the lookups, that are quantized."""
        return tuple(one for one in self.every() if one.is_quantized)

    def replaced(self) -> tuple[PlannedContraction, ...]:
        """Returns the contractions that are quantized or have an adapter."""
        return tuple(one for one in self.contractions if one.is_replaced)

    def every_replaced(self) -> tuple[Planned, ...]:
        """Returns `replaced`, then the lookups that are quantized."""
        lookups_ = (one for one in self.lookups if one.is_quantized)
        return (*self.replaced(), *lookups_)

    def left_float(self) -> tuple[PlannedContraction, ...]:
        """Returns the contractions that stay in float."""
        return tuple(one for one in self.contractions if not one.is_quantized)

    def reasons(self) -> str:
        """Returns why contractions stay in float, as the end of a message.

        A colon and a line for each contraction; or that there are none.
        """
        lines = [
            f"  {errors.label(one.path)}: {one.why_float}"
            for one in self.every()
            if not one.is_quantized
        ]
        return "\n".join([":", *lines]) if lines else f"; {NO_CONTRACTIONS}"

    def to_json(self, *, indent: int | None = None) -> str:
        """Writes the plan as JSON: a list of objects.

        One for each contraction, then one for each lookup.
        """
        rows = []
        for one in self.every():
            fields = {
                field.name: getattr(one, field.name)
                for field in dataclasses.fields(one)
                if field.name not in _OMITTED
            }
            if isinstance(one, PlannedContraction):
                fields["gradients_in"] = plan_table.gradients_in(one)
                if one.adapter is not None:
                    fields["adapter"] = json.loads(config.to_json(one.adapter))
            else:
                shared = one.contraction
                fields["table_of"] = None if shared is None else shared.path
            fields["lhs"], fields["rhs"] = map(dataclasses.asdict, (one.lhs, one.rhs))
            fields["cfg"] = json.loads(config.to_json(one.cfg))
            rows.append(fields)
        return json.dumps(rows, indent=indent)

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> rich.console.RenderResult:
        yield plan_table.layout(self.summary(), self._rows(), options.max_width)
        if self.unseen:
            yield rich.text.Text("\n".join(["Not entered:", *map(str, self.unseen)]))
        if self.forms is not None:
            yield rich.text.Text(str(self.forms))

    def _repr_html_(self) -> str:
        others = "".join(
            f"<p>Not entered: {html.escape(str(x))}</p>" for x in self.unseen
        )
        if self.forms is not None:
            others += f"<p>{html.escape(str(self.forms))}</p>"
        return plan_table.as_html(self.summary(), self._rows()) + others

    def _rows(self) -> list[tuple[str, ...]]:
        rows = plan_table.rows_of(self.contractions)
        count = max(map(len, rows), default=0)
        return rows + plan_table.rows_of_lookups(self.lookups, count)

    def invariant(self, closed: core.ClosedJaxpr) -> "Plan":
        """Returns the plan of a program whose bits depend on values alone.

        Args:
            closed: the program of the plan.
        """
        others = {one.site.location for one in self.every_replaced()}
        return dataclasses.replace(self, forms=finding.find(closed, others))

    def called_with(self, args: Any) -> "Plan":
        """Returns the plan of a program, with the processes of its arguments.

        Args:
            args: pytree of arrays, or their shapes.
        """
        return dataclasses.replace(self, devices=processes.spanned_by(args))

    def summary(self) -> str:
        """Returns the number of contractions, quantized and in float, as text."""
        counts = (
            f"{len(self.contractions)} contractions: {len(self.quantized())} "
            f"quantized, {len(self.left_float())} in float"
        )
        if not self.lookups:
            return counts
        quantized = sum(one.is_quantized for one in self.lookups)
        return (
            f"{counts}; {len(self.lookups)} lookups: {quantized} quantized, "
            f"{len(self.lookups) - quantized} in float"
        )

    def __repr__(self) -> str:
        return rich_tables.as_text(self)


_OMITTED = {
    "site",
    "kept_under",
    "kept_as",
    "gradients",
    "again",
    "contraction",
}
"""Fields that are no part of a plan in JSON."""


def make(
    closed: core.ClosedJaxpr,
    rules: Sequence[Rule],
    parameters: Mapping[int, str],
    naming: Naming = by_scope,
) -> Plan:
    """Decides about each contraction of a jaxpr.

    Args:
        closed: the jaxpr.
        rules: the rules.
        parameters: names of its inputs that are parameters, by index.
        naming: function that gives contractions their paths.

    Raises:
        RulesError: if no contraction meets the conditions of a required rule, or if
            such a rule names a path, a module or an operation, and earlier rules decide
            about all that it matches; and another rule of its group does no better.
    """
    kinds = (
        registry.OF_PRIMITIVES,
        user_rules.CALLS,
        {*opaque.names_in(closed), written_products.PRIMITIVE},
        forms_of_lookups.PRIMITIVES,
    )
    contents = sites.find(closed, parameters, set().union(*kinds))
    found, calls, others, reads = (
        [x for x in contents.contractions if x.eqn.primitive.name in names]
        for names in kinds
    )
    found = [site for site in found if not in_rules.is_quantized_already(site)]
    names = naming(found, parameters)
    paths = numbered([name.path for name in names])
    kept = numbered([name.kept_under for name in names])
    program = producers.Body(closed)
    planned = [
        _planned(site, name._replace(path=path), kept_as, rules, parameters, program)
        for site, name, path, kept_as in zip(found, names, paths, kept, strict=True)
    ]
    planned = in_rules.added(planned, calls, rules, parameters)
    read = lookups.planned(reads, planned, rules, parameters, naming)
    unseen = unseen_lib.found(others, calls, rules, program)
    used = {one.rule for one in unseen if one.is_left(rules)}
    for index, rule in enumerate(rules):
        if rule.is_required and index not in used:
            every: list[Planned] = [*planned, *read]
            unmatched.check_used(rules, index, every, closed, parameters, naming)
    return Plan(tuple(planned), tuple(rules), tuple(contents.named), unseen, read)


_FLOAT = config.unquantized()


def _planned(
    site: Site,
    name: Name,
    kept_as: str,
    rules: Sequence[Rule],
    parameters: Mapping[int, str],
    program: producers.Body,
) -> PlannedContraction:
    lhs, rhs = (
        PlannedOperand.of(atom.aval, origin, parameters)
        for atom, origin in zip(site.eqn.invars[:2], site.operands, strict=True)
    )
    given = injected.config_of(site)
    one = undecided(site, name, kept_as, lhs, rhs)
    named = names_of_weights(site, parameters)
    one = dataclasses.replace(one, parameters=named)
    if given is not None:
        one = dataclasses.replace(one, is_injected=True)
        why = why_not_quantized(site.eqn)
        if why is None and not isinstance(site.mark, injected.Described):
            why = obstacles.why_not_replaced(site)
        return dataclasses.replace(one, cfg=_FLOAT if why else given, why_float=why)
    index = matching.first_fulfilled(one, rules)
    cfg = None if index is None else rules[index].cfg
    why = _why_float(one, cfg, index, program)
    is_left_alone = unsummed.is_reason(why)
    one = dataclasses.replace(
        one, rule=index, why_float=why, is_left_alone=is_left_alone
    )
    adapter = None if index is None else rules[index].adapter
    if adapter is not None and why != EMPTY:
        one = dataclasses.replace(one, adapter=adapter)
        obstacle = why_not_quantized(site.eqn) or obstacles.why_not_replaced(site)
        with errors.naming(one.path):
            low_rank.check(one, cfg, obstacle)
    if cfg is None or not one.is_quantized:
        return one
    one, cfg = visibility.decided(one, _for_operands(one, cfg))
    if not one.is_quantized:
        return one
    if cfg.fwd.smoothing is None or one.op == "dot_general":
        return dataclasses.replace(one, cfg=cfg)
    return dataclasses.replace(
        one,
        cfg=config.update(cfg, {"fwd.smoothing": None}),
        why_not_smoothed=f"the channels of a {one.op} do not pair up",
    )


def _for_operands(one: PlannedContraction, cfg: config.DotGeneral) -> config.DotGeneral:
    """Returns a config without sparsity and rounding at conversion if without a weight.

    Raises:
        ValueError: if there is a weight that cannot be rounded so.
    """
    rhs = cfg.fwd.rhs
    if rhs.rounding is None and rhs.sparsity is None:
        return cfg
    if (one.lhs, one.rhs)[one.index("rhs")].kind != "weight":
        return config.update(cfg, {"fwd.rhs.rounding": None, "fwd.rhs.sparsity": None})
    if rhs.rounding is not None and one.op != "ragged_dot":
        avals = [atom.aval for atom in one.site.eqn.invars]
        with errors.naming(one.path):
            Matrices.of(one.operation(avals), one.in_order(avals)[1].shape)
    return cfg


def _why_float(
    one: PlannedContraction,
    cfg: config.DotGeneral | None,
    rule: int | None,
    program: producers.Body,
) -> str | None:
    why = why_not_quantized(one.site.eqn)
    if why is not None:
        return why
    if any(0 in x.shape for x in (one.lhs, one.rhs) if x.kind != "activation"):
        return EMPTY
    if rule is not None and (cfg is None or not cfg.is_quantized):
        return f"rule {rule} leaves it so"
    why = unsummed.why(one, program)
    if why == unsummed.SUMS_ONE and cfg is not None:
        _, decided = visibility.decided(one, cfg)
        operation, _, rhs = one.types()
        why = why if is_product(decided, operation, rhs.shape) else None
    if why is not None:
        return why
    return "no rule names it" if rule is None else obstacles.why_not_replaced(one.site)
