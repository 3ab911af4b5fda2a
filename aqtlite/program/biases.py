"""Corrects the biases of converted functions for the mean errors of their weights."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import logging
from jax.extend import core

from aqtlite import config, errors
from aqtlite.calibration import batches as batches_lib
from aqtlite.jaxpr import rewriting
from aqtlite.jaxpr.recognition import biases
from aqtlite.jaxpr.replacement import Location, Replacement
from aqtlite.program import served
from aqtlite.program.convert import ServingFunction, frozen_by_module, program_of
from aqtlite.program.planned import PlannedContraction
from aqtlite.program.program import Program
from aqtlite.program.served import Entries
from aqtlite.program.serving.frozen_record import COLLECTION
from aqtlite.program.serving.model import Parameter
from aqtlite.program.serving.placeholder import is_placeholder
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.shapes import processes


def correct_biases(
    serve: ServingFunction,
    params: Any,
    serving: Mapping[str, Any],
    batches: Iterable[Any],
    **kwargs: Any,
) -> dict[str, Any]:
    """Adds the mean error of each contraction to its bias (Nagel et al. 2019).

    A weight W that is rounded to Q changes the mean of the results by ``E[x] (Q - W)``,
    which the bias can take back (arXiv:1906.04721, section 4.2). The inputs ``x`` are
    those of the float function. The bias of a contraction is the parameter that is
    added to its result, and to nothing else between; contractions without one, and
    those in loops and branches, stay as they are.

    >>> import aqtlite
    >>> from aqtlite import config
    >>> def layer(params, x):
    ...     return x @ params["w"] + params["b"]
    >>> x = jnp.linspace(0, 1, 24).reshape(8, 3)
    >>> params = {"w": jax.random.normal(jax.random.key(0), (3, 4)), "b": jnp.ones(4)}
    >>> fn_q = aqtlite.quantize_function(layer, config.weight_only(3), params=0)
    >>> serve, serving = aqtlite.convert_function(fn_q, params, x)
    >>> serving = aqtlite.correct_biases(serve, params, serving, [x])
    >>> error = (serve(serving, x) - layer(params, x)).mean(0)
    >>> bool(jnp.abs(error).max() < 1e-6)
    True

    Args:
        serve: the function that `convert_function` returned.
        params: the float parameters.
        serving: the serving parameters.
        batches: the other arguments of calls, each a tuple of positional arguments or a
            single argument; all of their elements count alike: there is no mask=. A
            batch that gives NaN or infinity is left out, with a warning.
        **kwargs: keyword arguments of the function, constants of the program.

    Returns:
        `serving` with other biases.

    Raises:
        TypeError: if `serve` is no such function, or `batches` not an iterable of
            batches.
        ValueError: if there is no batch of finite values, if no weight is frozen beside
            a bias, or for a contraction with smoothing or rotation.
    """
    if not isinstance(serve, ServingFunction):
        raise TypeError(
            "correct_biases takes the function that aqtlite.convert_function returned, "
            f"got {type(serve).__name__}"
        )

    @jax.jit
    def errors(params: Any, serving: Any, args: tuple[Any, ...]) -> Errors:
        state, function = serving["state"], serve.function
        program = program_of(function, params, args, kwargs, state)
        values = program.traced.values(((params, *args), kwargs))
        weights = frozen_of(program, frozen_by_module(serving[COLLECTION]))
        return errors_of(program.traced.jaxpr, program.parameters, values, weights)

    found = mean_errors(
        lambda args: errors(params, serving, args), batches, (params, serving)
    )
    return {**serving, "params": with_errors(serving["params"], found)}


class SummedError(NamedTuple):
    """The error of the results that a bias is added to; of the shape of the bias."""

    total: jax.Array
    """Sum over the results that share an element of the bias, float32."""

    elements: jax.Array
    """Number of these results, float32."""


Errors = dict[int, SummedError]
"""Errors by the number of the parameter that is the bias."""


class FrozenOperand(NamedTuple):
    """A frozen operand of a contraction that is traced in float."""

    contraction: PlannedContraction
    place: int
    """Index among the inputs of its equation."""

    qtensor: QTensor
    cfg: config.DotGeneral


def frozen_of(program: Program, frozen: Entries) -> list[FrozenOperand]:
    """Returns the frozen operands of a program.

    Args:
        program: the call.
        frozen: the frozen weights, by module.
    """
    found = []
    for one, module, _ in program.numbered():
        if not isinstance(one, PlannedContraction):
            continue  # Nothing is added to the rows that a lookup reads.
        entries = frozen.get(module, ())
        weights = served.find(program, one, {*program.parameters}, entries, _CONVERTER)
        found += [
            FrozenOperand(one, one.index(side), weight.qtensor, one.cfg)
            for side, weight in weights.items()
        ]
    return found


def errors_of(
    closed: core.ClosedJaxpr,
    parameters: Mapping[int, Parameter],
    values: list[Any],
    frozen: Sequence[FrozenOperand],
) -> Errors:
    """Returns the errors that the biases of a call are to take back.

    Args:
        closed: jaxpr of the call.
        parameters: its inputs that are parameters, by index.
        values: its inputs, with float parameters.
        frozen: the frozen operands of its contractions.

    Raises:
        ValueError: if no weight is frozen beside a bias, or for a contraction with
            smoothing or rotation.
    """
    by_location: dict[Location, list[FrozenOperand]] = {}
    for operand in frozen:
        location = operand.contraction.site.location
        by_location.setdefault(location, []).append(operand)
    measured: dict[int, dict[Location, Replacement]] = {}
    for location, operands in by_location.items():
        bias = biases.find(closed, location)
        if bias is None or bias.input not in parameters or len(operands) != 1:
            continue
        _check_is_plain(operands[0])
        replacement = Replacement(_measuring(operands[0], bias), has_aux=True)
        measured.setdefault(bias.input, {})[location] = replacement
    # What else reads a parameter would change with it.
    own = {
        number: replacements
        for number, replacements in measured.items()
        if biases.count_reads(closed, number) == len(replacements)
    }
    replacements = {place: one for ones in own.values() for place, one in ones.items()}
    if not replacements:
        raise ValueError(
            "correct_biases found no frozen weight whose contraction has a bias: give "
            "it what the conversion returned, of layers with biases that are outside "
            "of loops"
        )
    counts = len(replacements), len(by_location)
    logging.info("corrects biases of %d of %d contractions", *counts)
    _, aux = rewriting.evaluate(closed, values, replacements)
    # A layer that is called twice has one bias for both.
    return {
        parameters[number].number: jax.tree.map(
            lambda *sums: sum(sums), *(aux[place] for place in ones)
        )
        for number, ones in own.items()
    }


_CONVERTER = "the conversion"


def _measuring(operand: FrozenOperand, bias: biases.Bias) -> Any:
    """Returns a float contraction that leaves the error of its result."""
    one, place, frozen, _ = operand

    def function(values: Any, given: None) -> tuple[Any, SummedError]:
        del given
        eqn, floats = one.site.eqn, [values[i].astype(jnp.float32) for i in (0, 1)]
        rounded = frozen.in_own_order().dequant().astype(jnp.float32)
        floats[place] = floats[place] - rounded
        params = {**eqn.params, "preferred_element_type": jnp.dtype("float32")}
        error = eqn.primitive.bind(*floats, *values[2:], **params)
        return one.in_float(values), SummedError(*bias.sums(error))

    return function


def _check_is_plain(operand: FrozenOperand) -> None:
    """Checks that the frozen values of a weight are those of the float one, rounded.

    Raises:
        ValueError: if it is smoothed or rotated.
    """
    fwd = operand.cfg.fwd
    if fwd.smoothing is not None or fwd.rotation is not None:
        raise ValueError(
            f"the weight of {errors.quoted(operand.contraction.path)} is smoothed or "
            "rotated, and its frozen values are not those of the float weight: "
            "correct_biases takes configs without fwd.smoothing and fwd.rotation"
        )


def mean_errors(
    errors: Callable[[tuple[Any, ...]], Errors], batches: Iterable[Any], variables: Any
) -> dict[int, jax.Array]:
    """Returns the means of errors over the elements of batches, by number.

    Warns of batches that are left out, since they give NaN or infinity.

    Args:
        errors: function from the arguments of a batch to its errors.
        batches: the batches.
        variables: the variables with which errors are computed.

    Raises:
        ValueError: if there is no batch of finite values, and with any; if batches
            are not `processes.alike`.
    """
    total: Errors | None = None
    entered: list[jax.Array] = []
    for batch in processes.alike(batches_lib.check(batches), variables):
        args = batches_lib.args_of(batch)
        with batches_lib.called_with(batch):
            found = errors(args)
        if total is None:
            total = jax.tree.map(jnp.zeros_like, found)
        total, enters = _added(total, found)
        entered.append(enters)
    if total is None:
        raise ValueError("correct_biases was given no batch")
    left_out = [
        str(i) for i, enters in enumerate(jax.device_get(entered)) if not enters
    ]
    if not all(error.elements.all() for error in total.values()):
        raise ValueError(
            "correct_biases was given no batch of finite values and of at least one "
            "element, to whose errors a bias could be corrected: check the data and "
            "the parameters"
        )
    if left_out:
        warnings.warn(
            f"correct_biases left out batch {', '.join(left_out)}, whose results have "
            "NaN or infinity: check the data and the parameters",
            stacklevel=3,
        )
    return {number: error.total / error.elements for number, error in total.items()}


@jax.jit
def _added(total: Errors, found: Errors) -> tuple[Errors, jax.Array]:
    """Adds errors if all are finite; returns whether they are, too."""
    sums = [error.total for error in found.values()]
    is_finite = jnp.stack([jnp.isfinite(one).all() for one in sums]).all()
    added = jax.tree.map(lambda a, b: jnp.where(is_finite, a + b, a), total, found)
    return added, is_finite


def with_errors(params: Any, errors: Mapping[int, jax.Array]) -> Any:
    """Returns parameters with errors added.

    Args:
        params: pytree of parameters, some of which may be frozen.
        errors: what is added to a leaf, by its number.
    """
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_placeholder)
    for number, error in errors.items():
        leaves[number] = (leaves[number] + error).astype(leaves[number].dtype)
    return jax.tree.unflatten(treedef, leaves)
