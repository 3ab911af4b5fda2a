"""Results that do not depend on later positions, or on other examples.

Some places along an axis of the arguments get other values, and results at the other
places are compared, bit for bit. Where they differ, `first_leak` looks for the
contraction at which they begin to.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core

from aqtlite.flax.nnx import QuantizedModel, plan, quantize_model
from aqtlite.jaxpr import tracing
from aqtlite.program.modules import flax_models
from aqtlite.testing import arguments, differences, first_leak, other_values
from aqtlite.testing.places import Places

_CUTS = 64
"""Largest number of cuts; each is two runs of the compiled function."""


def assert_causal(
    fn: Callable[..., Any],
    *args: Any,
    axis: int = 1,
    argnums: int | Sequence[int] | None = None,
) -> None:
    """Asserts that results do not depend on later positions.

    Gives the positions from a cut on other values, and compares the results before it
    bit for bit (0.0 equals -0.0, which a mask makes of other signs), for cuts at every
    position, or at 64 of more.
    A scale that positions share makes a quantized model depend on the future, which
    training then sees and decoding does not.

    >>> import jax.numpy as jnp
    >>> x = jnp.linspace(-1, 1, 24).reshape(1, 8, 3)
    >>> assert_causal(lambda x: jnp.cumsum(x, axis=1), x)
    >>> assert_causal(lambda x: x - jnp.mean(x, axis=1, keepdims=True), x)
    Traceback (most recent call last):
    ...
    AssertionError: results depend on later positions. ...

    Args:
        fn: function of pytrees of arrays: of a float or a quantized model, by rules or
            with injected functions, such as ``functools.partial(model.apply,
            variables)``, or an NNX module. It runs under `jax.jit`; where it is jitted
            itself, several assertions share its program.
        *args: its arguments. Arrays with more than one position along `axis` get other
            values at the later positions: floats the negated values of other positions,
            as they are and times 20, so that ranges move; integers others of the range
            that occurs. Masks (bool), random keys, and all that is bound to `fn`, such
            as variables, stay as they are.
        axis: axis of the positions, in arguments and results. Results without it are
            not compared.
        argnums: positions of the arguments that get other values; None for all. To be
            given where the axis of others is something else, or where integers or
            floats are no data, such as positions and float masks.

    Raises:
        AssertionError: if results differ; the message names the cut, the first result
            that differs, by how much, and the first contraction, by path, whose
            operands or scales changed at earlier positions.
        ValueError: if the comparison could not fail: no argument or no result has
            several positions, arguments have different numbers of them, or no result
            changes at all.
    """
    call = _Call.of(fn, args, axis, argnums, "positions")
    places = np.arange(call.size)
    last = call.size - 1
    others = np.linspace(1, last, min(last, _CUTS)).astype(int).tolist()
    cuts = dict.fromkeys((call.size // 2, *others))
    call.compare(
        {
            "results depend on later positions. With other values at positions from "
            f"{cut} on (axis {axis}), those before change in ": places >= cut
            for cut in cuts
        }
    )


def assert_independent(
    fn: Callable[..., Any],
    *args: Any,
    axis: int = 0,
    argnums: int | Sequence[int] | None = None,
) -> None:
    """Asserts that the results of an example do not depend on the others of its batch.

    Gives some examples other values, and compares the results of the others bit for
    bit, until every two examples were on different sides, both ways.

    >>> import jax.numpy as jnp
    >>> x = jnp.linspace(-1, 1, 12).reshape(4, 3)
    >>> assert_independent(jnp.sin, x)
    >>> assert_independent(lambda x: x / jnp.max(jnp.abs(x)), x)
    Traceback (most recent call last):
    ...
    AssertionError: results of examples depend on other examples. ...

    Args:
        fn: as in `assert_causal`.
        *args: its arguments. Arrays with more than one example along `axis` get other
            values, as in `assert_causal`.
        axis: axis of the examples, in arguments and results. Results without it are
            not compared.
        argnums: as in `assert_causal`.

    Raises:
        AssertionError: if results differ, as in `assert_causal`.
        ValueError: if the comparison could not fail, as in `assert_causal`.
    """
    call = _Call.of(fn, args, axis, argnums, "examples")
    bits = range((call.size - 1).bit_length())
    choices = [
        (np.arange(call.size) >> bit & 1) == value for bit in bits for value in (1, 0)
    ]
    call.compare(
        {
            "results of examples depend on other examples. With other values in "
            f"examples {', '.join(map(str, np.flatnonzero(changed)))} (axis {axis}), "
            "the others change in ": changed
            for changed in choices
        }
    )


@dataclasses.dataclass(frozen=True)
class _Call:
    """A traced call, of whose arguments some places get other values."""

    traced: tracing.Traced
    inputs: Sequence[jax.Array]
    """Inputs of the jaxpr."""

    given: Mapping[int, int]
    """Axis of the places, for each input that gets other values."""

    axis: int
    noun: str
    """What the places are."""

    paths: Callable[[], list[str] | None]
    """Function that returns the paths of contractions that scopes do not name."""

    @classmethod
    def of(
        cls,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        axis: int,
        argnums: int | Sequence[int] | None,
        noun: str,
    ) -> "_Call":
        """Traces a call.

        Raises:
            ValueError: if no argument has several places, or several have different
                numbers of them.
        """
        traced = flax_models.trace(fn, args)
        inputs = [jnp.asarray(x) for x in traced.values(args)]
        given = arguments.along(
            traced, args, inputs, axis, argnums, noun, other_values.has_others
        )
        return cls(
            traced, inputs, given, axis, noun, functools.partial(_paths, fn, args)
        )

    @property
    def size(self) -> int:
        """Number of places."""
        return next(self.inputs[i].shape[along] for i, along in self.given.items())

    def compare(self, choices: Mapping[str, np.ndarray]) -> None:
        """Gives places other values, and compares the results at the others.

        Args:
            choices: which places get other values, by the beginning of the message of
                an error.

        Raises:
            AssertionError: if results differ.
            ValueError: if no result has the places, or none changes at all.
        """
        run = _compiled(self.traced.jaxpr)
        before = self._results(run(*self.inputs))
        if not before:
            raise ValueError(
                f"no result has {self.size} {self.noun} along axis {self.axis}, as the "
                f"arguments have: {', '.join(map(str, self.traced.jaxpr.out_avals))}"
            )
        has_changed = False
        for message, changed in choices.items():
            for others in (other_values.loud, other_values.plain):
                inputs = [
                    others(x, self.given[i], changed) if i in self.given else x
                    for i, x in enumerate(self.inputs)
                ]
                after = self._results(run(*inputs))
                for old, new in zip(before, after, strict=True):
                    difference = old.difference(new, changed)
                    has_changed |= difference.is_anywhere
                    if difference.elsewhere is not None:
                        places = Places(changed)
                        found = first_leak.describe(
                            self.traced.jaxpr,
                            self.inputs,
                            inputs,
                            old.number,
                            places,
                            self.noun,
                            self.paths(),
                        )
                        raise AssertionError(
                            f"{message}{difference.elsewhere}. {found}"
                        )
        if not has_changed:
            is_nan = any(one.is_nan for one in before)
            hint = ". All of a result is NaN, as of static ranges without statistics"
            raise ValueError(
                "no result changes where the arguments have other values: the "
                f"comparison could not fail{hint * is_nan}"
            )

    def _results(self, outputs: Sequence[Any]) -> list["_Result"]:
        return [
            _Result(
                f"output{jax.tree_util.keystr(path)}",
                i,
                self.axis % outputs[i].ndim,
                differences.data(outputs[i]),
            )
            for path, i in jax.tree.leaves_with_path(self.traced.outputs)
            if arguments.size(outputs[i], self.axis) == self.size
        ]


def _compiled(jaxpr: core.ClosedJaxpr) -> Callable[..., Sequence[jax.Array]]:
    """Returns a compiled function: of a call of a jitted one, with its program."""
    function = core.jaxpr_as_fun(jaxpr)
    is_jitted = [eqn.primitive.name for eqn in jaxpr.eqns] == ["jit"]
    return function if is_jitted else jax.jit(function)


class _Difference(NamedTuple):
    """Difference of a result in two runs."""

    is_anywhere: bool
    elsewhere: str | None
    """Description of the difference at places without other values, if any."""


class _Result(NamedTuple):
    """A result with the axis of the places."""

    name: str
    number: int
    axis: int
    value: np.ndarray

    @property
    def is_nan(self) -> bool:
        """Whether all its elements are NaN."""
        return jnp.issubdtype(self.value.dtype, jnp.inexact) and bool(
            np.isnan(self.value).all()
        )

    def difference(self, other: "_Result", changed: np.ndarray) -> _Difference:
        """Compares with the result of other values at changed places."""
        old, new = self.value, other.value
        differs = differences.differing(old, new) & ~((old == 0) & (new == 0))
        is_anywhere = bool(differs.any())
        differs = differs.swapaxes(0, self.axis)
        differs[changed] = False
        differs = differs.swapaxes(0, self.axis)
        if not differs.any():
            return _Difference(is_anywhere, None)
        count = old.size // changed.size * int((~changed).sum())
        text = differences.describe(old, new, differs, "before", "after")
        return _Difference(
            is_anywhere,
            f"{self.name}, {old.dtype} of shape {old.shape}: {differs.sum()} of "
            f"{count} elements {text}",
        )


def _paths(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[str] | None:
    """Returns the paths of an NNX module's contractions, in program order.

    None for other functions, of which plans take the paths from name scopes.
    """
    if not isinstance(fn, nnx.Module):
        return None
    model = fn if isinstance(fn, QuantizedModel) else quantize_model(fn)
    return [one.path for one in plan(model, *args).contractions]
