"""Model factories: ``--model package.module:factory``."""

import importlib
import inspect
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from flax import nnx

from aqtlite import config, errors
from aqtlite.cli.suggestions import did_you_mean
from aqtlite.errors import UserError
from aqtlite.flax import QuantizedModel, quantize_model
from aqtlite.flax import nnx as aqt_nnx
from aqtlite.flax.linen.quantize_model import Model
from aqtlite.flax.nnx.model import QuantizedModel as QuantizedNnxModel


def find(name: str, option: str = "--model") -> Callable[..., Any]:
    """Imports a factory, or another function.

    Args:
        name: ``package.module:factory`` or ``path/to/file.py:factory``.
        option: option that names it, for error messages.

    Raises:
        UserError: if it cannot be imported, or is no function.
    """
    place, _, attribute = name.rpartition(":")
    module = _import(place, f"{option} {name}")
    if not hasattr(module, attribute):
        functions = [
            other
            for other, value in vars(module).items()
            if callable(value) and not other.startswith("_")
        ]
        hint = did_you_mean(attribute, functions)
        raise UserError(f"{option} {name}: {place} has no {attribute!r}{hint}")
    factory: Callable[..., Any] = getattr(module, attribute)
    if not callable(factory):
        raise UserError(
            f"{option} {name} has to be a function, not {errors.brief(factory)}"
        )
    return factory


def _import(place: str, option: str) -> Any:
    if not place.endswith(".py"):
        return import_module(place, option)
    # The file can import its neighbours, as with `python file.py`.
    path = pathlib.Path(place)
    loaded = getattr(sys.modules.get(path.stem), "__file__", None)
    if path.stem in sys.modules and loaded != str(path.resolve()):
        raise UserError(
            f"{option}: Python has a module {path.stem!r} of its own; rename the file"
        )
    return import_module(path.stem, option, path.parent)


def import_module(name: str, option: str, folder: pathlib.Path = pathlib.Path()) -> Any:
    """Imports a user's module; modules in `folder` take precedence.

    Args:
        name: name of the module.
        option: option that names the module, for error messages.
        folder: folder put first on the import path, by default the working directory.

    Raises:
        UserError: if the import raises.
    """
    sys.path.insert(0, str(folder.resolve()))
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
        factory: factory from `find`.
        cfg: config passed to the factory, or to `quantize_model` if the factory takes
            no argument; None calls the factory without one. Rules, as a tuple, are
            for `quantize_model` always.

    Returns:
        The model, sample arguments and sample keyword arguments.

    Raises:
        UserError: if the factory raises, returns something else, or has a parameter
            for a config that is not there.
    """
    is_config = isinstance(cfg, config.DotGeneral)
    is_argument = is_config and _takes(factory, cfg)
    if not is_argument and not _takes(factory):
        raise UserError(
            f"--model {name} has a parameter that nothing fills: give it a default, or "
            "a config by --preset or --config"
        )
    called_with = "the config" if is_argument else "nothing"
    try:
        made = factory(cfg) if is_argument else factory()
    except (Exception, SystemExit) as error:
        raise UserError(
            f"--model {name} (called with {called_with}) raised {_in_one_line(error)}"
        ) from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise UserError(
            f"--model {name} has to return (model, sample_args) or (model, "
            f"sample_args, sample_kwargs), not {type(made).__name__}"
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
    if cfg is not None and not is_argument:
        model = _quantized(name, model, cfg)
    return model, sample_args, dict(*rest)


def _takes(factory: Callable[..., Any], *args: Any) -> bool:
    try:
        inspect.signature(factory).bind(*args)
    except TypeError:
        return False
    return True


def _quantized(name: str, model: Any, cfg: Any) -> Any:
    """Quantizes the float model of a factory by a config or by rules."""
    if isinstance(model, QuantizedModel | QuantizedNnxModel):
        raise UserError(
            f"--model {name} takes no config, and its model is quantized already: "
            "leave out --preset, --config and --rules, or give the factory a parameter "
            "for a config"
        )
    if isinstance(model, nnx.Module):
        return aqt_nnx.quantize_model(model, cfg)
    return quantize_model(model, cfg)


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
