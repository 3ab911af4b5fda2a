"""The command ``aqtlite report``."""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from aqtlite.checkpoint.linen import LinenVariables
from aqtlite.checkpoint.variables import tracing_with
from aqtlite.cli import factory, output
from aqtlite.cli.configs import config_of
from aqtlite.errors import UserError
from aqtlite.reporting import program
from aqtlite.reporting.report import Report, report


def run(args: argparse.Namespace) -> None:
    """Runs ``aqtlite report``."""
    if len(args.models) > 2:
        raise UserError(f"give one or two factories, not {len(args.models)}")
    if args.measure < 0:
        raise UserError(f"--measure must be a number of runs, got {args.measure}")
    if args.measure and args.platform is not None:
        raise UserError("--measure runs the model here: give no --platform")
    if args.html is not None:
        if len(args.models) == 2:
            raise UserError("--html shows one report: give one factory")
        output.check_free(args.html, args.overwrite)
    last = len(args.models) - 1
    reports = [
        _report(name, config_of(args) if i == last else None, args)
        for i, name in enumerate(args.models)
    ]
    shown: Any = reports[0] if last == 0 else reports[0].compare(reports[1])
    # What was measured is shown, even if the page cannot be written.
    if args.json:
        print(shown.to_json(indent=2))
    else:
        output.results().print(shown)
    if args.html is not None:
        reports[0].to_html(args.html)


def _report(name: str, cfg: Any, args: argparse.Namespace) -> Report:
    make = factory.find(name, "the factory")
    model, sample_args, sample_kwargs = factory.call(name, make, cfg)
    given = sample_args
    if isinstance(model, nnx.Module):
        if args.measure:
            graphdef, state = nnx.split(model)
            model = nnx.merge(graphdef, _ones(state))
    else:
        variables = LinenVariables(model, sample_args, sample_kwargs).initial()
        given = (variables, *sample_args)
    fn: Any = model
    params = None
    if args.backward:
        fn, given = _backward(model, given)
        params = 0
    with tracing_with(model, sample_args, sample_kwargs):
        return report(
            fn,
            *(_ones(given) if args.measure else given),
            params=params,
            platform=args.platform,
            measured_runs=args.measure,
            **(_ones(sample_kwargs) if args.measure else sample_kwargs),
        )


def _ones(given: Any) -> Any:
    """Returns arguments with arrays of ones in the place of shapes."""

    def of_leaf(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(0), x.shape)
        return jnp.ones(x.shape, x.dtype)

    return jax.tree.map(of_leaf, given)


def _backward(
    model: Any, given: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a function that takes the gradient of a model, and its arguments."""
    if isinstance(model, nnx.Module):
        call, given = program.of_nnx(model, given)
    else:
        call = model.apply

    def gradient(variables: Any, *inputs: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten(variables)
        places = [i for i, x in enumerate(leaves) if _is_float(x)]

        def loss(floats: list[Any]) -> jax.Array:
            filled = list(leaves)
            for i, x in zip(places, floats, strict=True):
                filled[i] = x
            out = call(jax.tree.unflatten(treedef, filled), *inputs, **kwargs)
            results = [x for x in jax.tree.leaves(out) if _is_float(x)]
            return sum((jnp.mean(x, dtype=jnp.float32) for x in results), jnp.zeros(()))

        return jax.value_and_grad(loss)([leaves[i] for i in places])

    gradient.__name__ = f"gradient of {type(model).__name__}"
    return gradient, given


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)
