"""Registry of the classes that configs may contain, by their name in JSON."""

import dataclasses
from typing import TypeVar

from aqtlite import calibration, noise, numerics
from aqtlite.config.blocks import Blocks, LocalAqt
from aqtlite.config.dot_general import DotGeneral, DotGeneralRaw
from aqtlite.config.double_scales import DoubleScales
from aqtlite.config.lora import Dora, Lora
from aqtlite.config.optimizer_states import OptimizerStates
from aqtlite.config.rotation import Hadamard
from aqtlite.config.rounding import Gptq
from aqtlite.config.smoothing import Smoothing
from aqtlite.config.sparsity import NofM
from aqtlite.config.tensor import Tensor

Class = TypeVar("Class", bound=type)

_FAMILIES = numerics.Numerics, calibration.Calibration, noise.Noise
_PARTS = (
    Blocks,
    DotGeneral,
    DotGeneralRaw,
    Dora,
    DoubleScales,
    Gptq,
    Hadamard,
    LocalAqt,
    Lora,
    NofM,
    OptimizerStates,
    Smoothing,
    Tensor,
)

_offered = [
    one
    for module in (calibration, noise, numerics)
    for one in vars(module).values()
    if isinstance(one, type) and issubclass(one, _FAMILIES)
]
_classes: dict[str, type] = {
    cls.__name__: cls
    for cls in (*_PARTS, numerics.NoNumerics, *_offered)
    if dataclasses.is_dataclass(cls)
}


class UnknownClassError(ValueError):
    """JSON names a class that is not registered in this program."""


def register(cls: Class) -> Class:
    """Registers a custom grid, calibration or noise for JSON and checkpoints.

    A class decorator. Objects are written and read by class name: JSON and checkpoints
    name classes and never import them, so a program that reads them has to define and
    register the class too.

    >>> import dataclasses
    >>> from aqtlite import calibration, config
    >>> @config.register
    ... @dataclasses.dataclass(frozen=True)
    ... class Always(calibration.Calibration):
    ...     largest: float = 1.0
    ...
    ...     def bound(self, x, axes):
    ...         return jnp.full_like(x.max(axes, keepdims=True), self.largest)
    >>> import jax.numpy as jnp
    >>> tensor = config.Tensor(
    ...     numerics=numerics.IntSymmetric(bits=8), calibration=Always(2.0)
    ... )
    >>> config.from_json(config.to_json(tensor)) == tensor
    True

    Args:
        cls: frozen dataclass derived from `numerics.Numerics`,
            `calibration.Calibration` or `noise.Noise`.

    Returns:
        The class itself.

    Raises:
        TypeError: if `cls` is not such a class.
        ValueError: if another class is registered under the same name. A class that is
            defined again, as in a notebook, replaces the earlier definition.
    """
    if not (isinstance(cls, type) and issubclass(cls, _FAMILIES)):
        raise TypeError(
            "register takes a subclass of numerics.Numerics, calibration.Calibration "
            f"or noise.Noise, got {cls!r}"
        )
    if not (dataclasses.is_dataclass(cls) and cls.__hash__ is not None):
        raise TypeError(
            f"{cls.__name__} must be a frozen dataclass, so that configs can be "
            "compared and hashed; decorate it with @dataclasses.dataclass(frozen=True)"
        )
    known = _classes.get(cls.__name__)
    if known is not None and _origin(known) != _origin(cls):
        raise ValueError(
            f"a class named {cls.__name__!r} is registered already: "
            f"{'.'.join(_origin(known))}; rename {'.'.join(_origin(cls))}"
        )
    _classes[cls.__name__] = cls
    return cls


def _origin(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def names() -> list[str]:
    """Registered names, sorted."""
    return sorted(_classes)


def find(name: str) -> type | None:
    """The class registered under a name; None if there is none."""
    return _classes.get(name)
