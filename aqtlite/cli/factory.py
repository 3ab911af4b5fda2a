"""Factories of models: ``--model package.module:factory``."""

import importlib
import os
import sys
from typing import Any

from flax import linen as nn

from aqtlite.errors import UserError


def call(name: str, cfg: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Imports a factory and calls it.

    Args:
        name: ``package.module:factory``.
        cfg: its argument; None calls it without one.

    Returns:
        The model, its sample arguments and its sample keyword arguments.

    Raises:
        UserError: if it cannot be imported, raises, or returns something else.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise UserError(f"--model {name}: write it as package.module:factory")
    # As `python -m` does: modules of the working directory come first.
    sys.path.insert(0, os.getcwd())
    called_with = "nothing" if cfg is None else "the config"
    # The user's code may raise anything; -v shows where.
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
        made = factory() if cfg is None else factory(cfg)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"--model {name} (called with {called_with}) raised "
            f"{type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise UserError(
            f"--model {name} has to return (model, sample_args) or (model, "
            f"sample_args, sample_kwargs), not a {type(made).__name__}"
        )
    model, sample_args, *rest = made
    if not isinstance(sample_args, tuple):
        raise UserError(
            f"--model {name}: sample_args has to be a tuple, not a "
            f"{type(sample_args).__name__}"
        )
    if not isinstance(model, nn.Module):
        raise UserError(
            f"--model {name}: the model has to be a Linen module, not {model!r}"
        )
    if rest and not isinstance(rest[0], dict):
        raise UserError(
            f"--model {name}: sample_kwargs has to be a dict, not {rest[0]!r}"
        )
    return model, sample_args, dict(*rest)
