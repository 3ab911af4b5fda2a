"""The command ``aqtlite presets``."""

import argparse
import inspect
import json

import rich.box
import rich.table

from aqtlite import config
from aqtlite.cli import output
from aqtlite.cli.shared_options import BITS_OF, STATIC


def run(args: argparse.Namespace) -> None:
    """Runs ``aqtlite presets``."""
    presets = config.presets()
    if args.name is None:
        _list(presets, args.json)
    elif args.json:
        # Exactly the format that --config reads.
        print(config.to_json(presets[args.name].make(), indent=2))
    else:
        _explain(args.name, presets[args.name])


def _list(presets: config.Presets, as_json: bool) -> None:
    if as_json:
        output.print_json({name: _as_dict(one) for name, one in presets.items()})
        return
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("preset", no_wrap=True)
    table.add_column("what it is")
    table.add_column("for")
    for name, one in presets.items():
        needs = f" (needs {one.needs})" if one.needs else ""
        needs = " (no --preset)" if name == "unquantized" else needs
        table.add_row(name, one.purpose, one.audience + needs)
    output.results().print(table)


def _as_dict(preset: config.Preset) -> dict[str, object]:
    return {
        "purpose": preset.purpose,
        "for": preset.audience,
        "needs": preset.needs,
        "config": json.loads(config.to_json(preset.make())),
    }


def _explain(name: str, preset: config.Preset) -> None:
    print(f"config.{name}{inspect.signature(preset.make)}\n")
    print(f"what   {preset.purpose}")
    print(f"for    {preset.audience}")
    print(f"needs  {preset.needs or 'nothing beside the model'}\n")
    print(config.describe(preset.make()))
    if name == "unquantized":
        return
    bits = " --fwd-bits 8" if name in BITS_OF else ""
    data = " --calibrate data.npz" if name in STATIC else ""
    print(f"\naqtlite convert IN OUT --model FACTORY --preset {name}{bits}{data}")
