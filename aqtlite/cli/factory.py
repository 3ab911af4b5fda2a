"""Factories of models: ``--model package.module:factory``."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from flax import nnx

from aqtlite.errors import UserError
from aqtlite.flax.linen.quantize_model import Model


def find(name: str) -> Callable[..., Any]:
    """Imports a factory.

    Args:
        name: ``package.module:factory``.

    Raises:
        UserError: if it cannot be imported.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise UserError(f"--model {name}: write it as package.module:factory")
    module = import_module(module_name, f"--model {name}")
    if not hasattr(module, attribute):
        raise UserError(f"--model {name}: {module_name} has no {attribute!r}")
    factory: Callable[..., Any] = getattr(module, attribute)
    return factory


def import_module(name: str, option: str) -> Any:
    """Imports a user's module; those of the working directory come first.

    Args:
        name: name of the module.
        option: option that names the module, for error messages.

    Raises:
        UserError: if that raises.
    """
    sys.path.insert(0, os.getcwd())  # As `python -m` does.
    # The user's code may raise anything; -v shows where.
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise UserError(f"{option} raised {_in_one_line(error)}") from error


def call(
    name: str, factory: Callable[..., Any], cfg: Any
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Calls a factory.

    Args:
        name: ``package.module:factory``, for error messages.
        factory: the factory, from `find`.
        cfg: argument of the factory; None calls it without one.

    Returns:
        The model, its sample arguments and its sample keyword arguments.

    Raises:
        UserError: if it raises, or returns something else.
    """
    called_with = "nothing" if cfg is None else "the config"
    try:
        made = factory() if cfg is None else factory(cfg)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"--model {name} (called with {called_with}) raised {_in_one_line(error)}"
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
    if not isinstance(model, Model | nnx.Module):
        raise UserError(
            f"--model {name}: the model has to be a Linen or NNX module, or what "
            f"quantize_model made of one, not {model!r}"
        )
    if rest and not isinstance(rest[0], dict):
        raise UserError(
            f"--model {name}: sample_kwargs has to be a dict, not {rest[0]!r}"
        )
    return model, sample_args, dict(*rest)


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
