"""A traced function, as what JAX compiles."""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from aqtlite.jaxpr import tracing
from aqtlite.program.compiled.compile_serving import ServingProgram
from aqtlite.program.modules import flax_models, nnx_arguments
from aqtlite.program.modules.nnx_arguments import Structure
from aqtlite.program.naming import Parameters, names_of_parameters, positions_of


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function."""

    traced: Any
    """Result of `jax.jit(...).trace`."""

    parameters: dict[int, str]
    """Names of the inputs that are parameters, by index."""

    names: tuple[str, ...]
    """Names of all inputs."""

    name: str
    call: Callable[[], Any]
    """Runs the function, with copies of its arguments, which it may donate."""


def trace(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], params: Parameters
) -> Program:
    """Traces a function or a model.

    Args:
        fn: a function, jitted or not; a model of Linen, or another one whose `apply`
            takes the variables first; or a model of NNX.
        args: its arguments, or `jax.ShapeDtypeStruct`s for arrays.
        kwargs: as `args`. What is no array is a constant of the program.
        params: which arguments are parameters, as in `aqtlite.plan`.

    Raises:
        TypeError: if `fn` is none of these, compiled already, or a Linen model without
            its variables.
    """
    flax_models.check_variables(fn, args, "report")
    name = getattr(fn, "__name__", type(fn).__name__)
    if flax_models.is_nnx(fn):
        fn, args = of_nnx(fn, args)
        params = 0 if params is None else params
    elif hasattr(fn, "apply"):
        fn = fn.apply
        params = 0 if params is None else params
    if isinstance(fn, jax.stages.Compiled | ServingProgram):
        raise TypeError(
            "report compiles itself: give the function that was compiled, with all of "
            f"its arguments, in place of the {type(fn).__name__}"
        )
    if not callable(fn):
        raise TypeError(
            "report takes a function, a Linen model with its variables, or an NNX "
            f"model, got {type(fn).__name__}"
        )
    with flax_models.marking_modules():
        fn, args, kwargs = _without_objects(fn, args, kwargs)
        traced, call = _traced(fn, args, kwargs)
    found = tracing.Traced(
        traced.jaxpr, None, None, tuple(range(len(traced.jaxpr.in_avals)))
    )
    given = getattr(traced, "args_info", (args, kwargs))
    names = names_of_parameters(lambda path: True, found, *given)
    return Program(
        traced,
        names_of_parameters(positions_of(params), found, *given),
        tuple(names[i] for i in range(len(names))),
        name,
        call,
    )


def _without_objects(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Returns a function of the state of NNX objects, and its arguments.

    It also returns what it changes in them, such as the parameters that a training step
    updates, which nothing would be left of otherwise. Other functions stay as they are.
    """
    leaves, arguments = nnx_arguments.leaves_of((args, kwargs))
    places = [i for i, x in enumerate(leaves) if nnx_arguments.is_object(x)]
    if not places:
        return fn, args, kwargs
    nnx = sys.modules["flax.nnx"]
    graphdef, state = nnx.split([leaves[i] for i in places], graph=True)
    structure = Structure(arguments, graphdef)
    # Each state stands where its object does, so that it keeps its name. An object that
    # shares all variables with those before it has none.
    for number, place in enumerate(places):
        leaves[place] = state.get(number, ())

    @functools.wraps(fn, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        others = arguments.flatten_up_to((args, kwargs))
        states = {number: others[places[number]] for number in state}
        before = nnx.State(states)
        for place in places:
            others[place] = None
        given = jax.tree.leaves(before)  # Before the call writes into the same state.
        out, after = structure.call(fn, before, others)
        return out, [
            x for x in jax.tree.leaves(after) if all(x is not y for y in given)
        ]

    return run, *jax.tree.unflatten(arguments, leaves)


def _traced(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Callable[[], Any]]:
    """Returns a traced function, and a function that runs it."""

    def of(jitted: Any, *given: Any) -> tuple[Any, Callable[[], Any]]:
        def call() -> Any:
            args, kwargs = jax.tree.map(_copy, given)
            return jitted(*args, **kwargs)

        args, kwargs = given
        return jitted.trace(*args, **kwargs), call

    if isinstance(fn, jax.stages.Wrapped):
        found = of(fn, args, kwargs)
        # `nnx.jit` has a trace of its own.
        if isinstance(found[0], jax.stages.Traced):
            return found
    leaves, treedef = jax.tree.flatten((args, kwargs))
    if all(map(tracing.is_array, leaves)):
        return of(jax.jit(fn), args, kwargs)
    # Arrays keep their places, so that they keep their names, too.
    constants = {i: x for i, x in enumerate(leaves) if not tracing.is_array(x)}
    arrays = [None if i in constants else x for i, x in enumerate(leaves)]
    given_args, given_kwargs = jax.tree.unflatten(treedef, arrays)

    @functools.wraps(fn, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        inputs = iter(jax.tree.leaves((args, kwargs)))
        filled = [
            constants[i] if i in constants else next(inputs) for i in range(len(leaves))
        ]
        real_args, real_kwargs = jax.tree.unflatten(treedef, filled)
        return fn(*real_args, **real_kwargs)

    return of(jax.jit(run), given_args, given_kwargs)


def _copy(x: Any) -> Any:
    return jnp.copy(x) if isinstance(x, jax.Array) else x


def of_nnx(
    model: Any, args: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a call of an NNX model as a function of its state, and its arguments.

    Args:
        model: the model, whose modules mark their equations while it is traced.
        args: arguments of the call.
    """
    nnx = sys.modules["flax.nnx"]
    from aqtlite.program.modules import marked_modules

    graph, state = nnx.split(model)

    def call(state: Any, *args: Any, **kwargs: Any) -> Any:
        merged = nnx.merge(graph, state)
        marked_modules.mark(merged)
        return merged(*args, **kwargs)

    return call, (state, *args)
