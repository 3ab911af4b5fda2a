"""Evaluation of a jaxpr, with a mask for each value.

Calls are followed into their bodies, and loops and branches are built anew, with masks
beside their values. Derivatives are not: nothing is differentiated that gathers
statistics alone.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from aqtlite.jaxpr import counted, equations, registry
from aqtlite.lowering import target
from aqtlite.program.masking import rules
from aqtlite.program.masking.masks import Lost, Mask, full
from aqtlite.shapes import sharding

Pair = tuple[list[Any], list[Mask]]
"""Values, and their masks."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """An evaluation, and what was learned in it."""

    masked: set[str] = dataclasses.field(default_factory=set)
    """Names of the arrays in which some elements may not count."""

    def run(
        self, closed: core.ClosedJaxpr, values: Sequence[Any], masks: Sequence[Mask]
    ) -> Pair:
        """Evaluates a jaxpr.

        Args:
            closed: a jaxpr that was traced in `counted.counting`.
            values: values of the inputs.
            masks: masks of the inputs.

        Returns:
            The values and the masks of the outputs.

        Raises:
            ValueError: if the mask of an array is asked for, and was lost.
        """
        jaxpr = closed.jaxpr
        known: dict[Any, tuple[Any, Mask]] = {
            var: (value, None)
            for var, value in zip(jaxpr.constvars, closed.consts, strict=True)
        }
        inputs = zip(values, masks, strict=True)
        known.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> tuple[Any, Mask]:
            if isinstance(atom, core.Literal):
                return equations.literal_value(atom), None
            return known[atom]

        for eqn in jaxpr.eqns:
            given, of_given = _apart([read(atom) for atom in eqn.invars])
            if all(mask is None for mask in of_given):
                outputs = equations.evaluate(jaxpr, eqn, given)
                found: list[Mask] = [None] * len(outputs)
            else:
                outputs, found = self._equation(jaxpr, eqn, given, of_given)
            known.update(
                zip(eqn.outvars, zip(outputs, found, strict=True), strict=True)
            )
        return _apart([read(atom) for atom in jaxpr.outvars])

    def _equation(
        self, jaxpr: Any, eqn: Any, values: list[Any], masks: list[Mask]
    ) -> Pair:
        """Evaluates an equation of which an input has a mask."""
        name = counted.name_of(eqn)
        if name is not None:
            return [self._answer(name, values[0], masks[0])], [masks[0]]
        if counted.is_like(eqn):
            return [values[0]], [masks[1]]
        if eqn.primitive is primitives.scan_p:
            return self._scan(eqn, values, masks)
        if eqn.primitive is primitives.while_p:
            return self._while(eqn, values, masks)
        if eqn.primitive is primitives.cond_p:
            return self._cond(jaxpr, eqn, values, masks)
        body = equations.called_body(eqn)
        reference = _reference(eqn)
        if reference is None and body is not None and not counted.is_opaque(eqn):
            return self.run(body, values, masks)
        outputs = equations.evaluate(jaxpr, eqn, values)
        if reference is not None:
            return outputs, self.run(reference, values, masks)[1]
        return outputs, _by_rule(eqn, values, masks, outputs)

    def _answer(self, name: str, value: Any, mask: Mask) -> Any:
        """Returns which elements of an array count."""
        if isinstance(mask, Lost):
            raise ValueError(
                f"mask= says which tokens count, and {name}, of shape "
                f"{jnp.shape(value)}, is computed by {mask.why}, through which "
                "tokens cannot be followed: whether its elements are of padding is "
                "not known. Give batches without padding, or a rule (for an injected "
                "function, a config) that gathers no statistics there"
            )
        if mask is None:
            return value
        self.masked.add(name)
        return full(mask, jnp.shape(value))

    def _scan(self, eqn: Any, values: list[Any], masks: list[Mask]) -> Pair:
        scan = equations.Scan.of(eqn)
        consts, start, scanned = scan.of_inputs(values)
        of_consts, of_start, of_scanned = scan.of_inputs(masks)
        # The mask of each step, where it is not the same for all steps.
        stepped = [_is_stepped(mask, scan.length) for mask in of_scanned]
        arrays = [mask for mask, one in zip(of_scanned, stepped, strict=True) if one]
        fixed = [m[0] if isinstance(m, jax.Array) and m.ndim else m for m in of_scanned]

        def step(forms: Sequence[Any], carry: Any, slices: Any) -> tuple[Any, Any]:
            (carried, of_carried), (sliced, own) = carry, slices
            each = iter(own)
            of_sliced = [
                next(each) if one else mask
                for mask, one in zip(fixed, stepped, strict=True)
            ]
            outputs, found = self.run(
                scan.body,
                [*consts, *carried, *sliced],
                [*of_consts, *_with_arrays(forms, of_carried), *of_sliced],
            )
            (final, stacks), (of_final, of_stacks) = map(
                scan.of_outputs, (outputs, found)
            )
            return (final, of_final), (stacks, of_stacks)

        slices = jax.tree.map(sharding.shape_of_slice, (scanned, arrays))
        forms = _forms_of_carry(
            of_start,
            lambda forms, of, slices: step(forms, (start, of), slices)[0][1],
            slices,
        )
        stack_forms: list[Any] = []

        def one_step(carry: Any, slices: Any) -> tuple[Any, Any]:
            (final, of_final), (stacks, of_stacks) = step(forms, carry, slices)
            stack_forms[:] = map(_form, of_stacks)
            kept = [m for m in of_stacks if _is_array(m)]
            return (final, _arrays(forms, of_final)), (stacks, kept)

        (final, of_final), (stacks, of_stacks) = lax.scan(
            one_step,
            (start, _arrays(forms, of_start)),
            (scanned, arrays),
            length=scan.length,
            reverse=scan.reverse,
        )
        masks = [
            *_with_arrays(forms, of_final),
            *_with_arrays(stack_forms, of_stacks),
        ]
        return [*final, *stacks], masks

    def _while(self, eqn: Any, values: list[Any], masks: list[Mask]) -> Pair:
        loop = equations.While.of(eqn)
        of_condition, of_body, start = loop.of_inputs(values)
        _, consts, of_start = loop.of_inputs(masks)

        def step(forms: Sequence[Any], carried: Any, of_carried: Any) -> Pair:
            given = [*consts, *_with_arrays(forms, of_carried)]
            return self.run(loop.body, [*of_body, *carried], given)

        forms = _forms_of_carry(of_start, lambda forms, of: step(forms, start, of)[1])

        def one_step(carry: Any) -> Any:
            final, of_final = step(forms, *carry)
            return final, _arrays(forms, of_final)

        def goes_on(carry: Any) -> Any:
            (found,) = core.jaxpr_as_fun(loop.condition)(*of_condition, *carry[0])
            return found

        if loop.condition.out_avals[0].shape:
            outputs = eqn.primitive.bind(*values, **eqn.params)
            return outputs, [Lost("a while loop in a jax.vmap")] * len(outputs)
        final, of_final = lax.while_loop(
            goes_on, one_step, (start, _arrays(forms, of_start))
        )
        return list(final), _with_arrays(forms, of_final)

    def _cond(self, jaxpr: Any, eqn: Any, values: list[Any], masks: list[Mask]) -> Pair:
        cond, (index, *operands) = equations.Cond.of(eqn), values
        if cond.platforms is not None:
            # The branches compute the same, and some may not lower on this platform.
            found = self.run(cond.branches[-1], operands, masks[1:])[1]
            return equations.evaluate(jaxpr, eqn, values), found
        forms: list[Any] = [None] * len(eqn.outvars)

        def masks_of(closed: core.ClosedJaxpr, *operands: Any) -> list[Mask]:
            return self.run(closed, operands, masks[1:])[1]

        for one in cond.branches:
            found = _traced_masks(functools.partial(masks_of, one), *operands)
            forms = list(map(_joined, forms, found))

        def branch(closed: core.ClosedJaxpr, *operands: Any) -> Any:
            outputs, found = self.run(closed, operands, masks[1:])
            return outputs, _arrays(forms, found)

        branches = [functools.partial(branch, one) for one in cond.branches]
        outputs, arrays = lax.switch(index, branches, *operands)
        return list(outputs), _with_arrays(forms, arrays)


def _reference(eqn: Any) -> core.ClosedJaxpr | None:
    """Returns what an equation computes, if that is another form of its function."""
    types = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in eqn.invars]
    function = target.function_of(eqn)
    if function is not None:
        return jax.make_jaxpr(function.reference)(*types)
    name = registry.name_of(eqn)
    if name is not None:
        return registry.body_of(eqn, name)
    # Their bodies have the inputs and the outputs of the equation.
    is_described = eqn.primitive.name in ("composite", "custom_vmap_call")
    return next(equations.bodies(eqn), None) if is_described else None


def _by_rule(
    eqn: Any, values: list[Any], masks: list[Mask], outputs: list[Any]
) -> list[Mask]:
    """Returns the masks of the outputs of an equation by the rule of its primitive."""
    followed: list[jax.Array | None] = []
    for mask in masks:
        if isinstance(mask, Lost):
            return [mask] * len(outputs)
        followed.append(mask)
    rule = rules.RULES.get(eqn.primitive.name)
    found = None if rule is None else rule(eqn, values, followed, outputs)
    if found is None:
        shapes = ", ".join(str(jnp.shape(x)) for x in values)
        why = f"{equations.called_name(eqn) or eqn.primitive.name} of {shapes}"
        return [Lost(why)] * len(outputs)
    return found


def _apart(pairs: Sequence[tuple[Any, Mask]]) -> Pair:
    return [value for value, _ in pairs], [mask for _, mask in pairs]


def _is_array(mask: Any) -> bool:
    return mask is not None and not isinstance(mask, Lost)


def _is_stepped(mask: Mask, length: int) -> bool:
    """Whether the mask of a scanned array differs between steps."""
    return isinstance(mask, jax.Array) and mask.shape[0] == length != 1


_Form = Any
"""What is known of a mask before a loop runs: None, `Lost`, or its shape."""


def _form(mask: Mask) -> _Form:
    return mask.shape if isinstance(mask, jax.Array) else mask


def _joined(one: _Form, other: _Form) -> _Form:
    """Returns the form of a mask that may be either of two."""
    for form in (one, other):
        if isinstance(form, Lost):
            return form
    if one is None or other is None:
        return other if one is None else one
    return jnp.broadcast_shapes(one, other)


def _forms_of_carry(
    start: Sequence[Mask], step: Callable[..., Sequence[Mask]], *others: Any
) -> list[_Form]:
    """Returns the forms of the masks that a loop carries.

    Args:
        start: masks before the first step.
        step: function from forms, their arrays and others to the masks after a step.
        *others: other arguments of a step, or their shapes.
    """
    forms = list(map(_form, start))
    while True:
        given = forms
        arrays = [jax.ShapeDtypeStruct(f, bool) for f in given if isinstance(f, tuple)]
        after = _traced_masks(functools.partial(step, given), arrays, *others)
        forms = list(map(_joined, given, after))
        if forms == given:
            return forms


def _traced_masks(function: Callable[..., Sequence[Mask]], *given: Any) -> list[_Form]:
    """Returns the forms of the masks that a function of arrays returns."""
    found: list[_Form] = []

    def run(*given: Any) -> None:
        found[:] = map(_form, function(*given))

    jax.eval_shape(run, *given)
    return found


def _arrays(forms: Sequence[_Form], masks: Sequence[Mask]) -> list[jax.Array]:
    """Returns masks as the arrays of their forms."""
    return [
        full(mask, form) if isinstance(mask, jax.Array) else jnp.ones(form, bool)
        for form, mask in zip(forms, masks, strict=True)
        if isinstance(form, tuple)
    ]


def _with_arrays(forms: Sequence[_Form], arrays: Sequence[jax.Array]) -> list[Mask]:
    """Returns the masks of some forms and arrays."""
    given = iter(arrays)
    return [next(given) if isinstance(one, tuple) else one for one in forms]
