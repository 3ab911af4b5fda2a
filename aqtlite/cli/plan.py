"""The command ``aqtlite plan``."""

import argparse
from typing import Any

from flax import nnx

from aqtlite.checkpoint.linen import LinenVariables
from aqtlite.checkpoint.variables import tracing_with
from aqtlite.cli import factory, output
from aqtlite.cli.configs import config_of
from aqtlite.errors import UserError
from aqtlite.flax import nnx as aqt_nnx
from aqtlite.flax.linen import quantize_model
from aqtlite.program import contracted_in
from aqtlite.program.measuring import kept_times
from aqtlite.program.measuring.measure import measure_serving, measure_training
from aqtlite.program.measuring.measurement import Measurement
from aqtlite.program.plan import Plan


def run(args: argparse.Namespace) -> None:
    """Runs ``aqtlite plan``."""
    make = factory.find(args.model)
    model, sample_args, sample_kwargs = factory.call(args.model, make, config_of(args))
    with tracing_with(model, sample_args, sample_kwargs):
        plan = _plan(model, sample_args, sample_kwargs)
    if args.measure is not None and not plan.quantized():
        advice = "name a config by --preset, --config or --rules"
        raise UserError(
            "nothing to measure: the plan quantizes none of the model's contractions"
            + plan.reasons()
            + (f"\nUnless you named one, {advice}." if plan.contractions else "")
        )
    plan = contracted_in.on_platform(plan, args.platform)
    shown = plan if args.measure is None else _measured(plan, args.measure)
    if args.json:
        print(shown.to_json(indent=2))
    else:
        output.results().print(shown, soft_wrap=args.measure is not None)


_MEASURES = {"serving": measure_serving, "training": measure_training}


def _measured(plan: Plan, purpose: str) -> Measurement:
    """Measures contractions whose times the user's cache does not hold yet."""
    try:
        folder = kept_times.user_folder()
        measured = _MEASURES[purpose](plan, cache_dir=folder)
    except OSError as error:
        output.messages().print(f"the times are not kept: {error}", soft_wrap=True)
        return _MEASURES[purpose](plan)
    file = kept_times.path_in(folder)
    text = f"the times are kept in {file}: delete it to measure them again"
    output.messages().print(text, soft_wrap=True)
    return measured


def _plan(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    if isinstance(model, nnx.Module):
        return aqt_nnx.plan(model, *args, **kwargs)
    return quantize_model.plan(
        model, LinenVariables(model, args, kwargs).initial(), args, kwargs
    )
