"""What conversion and loading need to know of a model, and how they match a source."""

import abc
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar

import jax
from flax import errors

from aqtlite.checkpoint.arrays import ArrayInfo
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import Reader
from aqtlite.checkpoint.manifest import Manifest, info_of
from aqtlite.jaxpr import tracing
from aqtlite.program.serving.model import Buffer
from aqtlite.program.serving.planning import Plan
from aqtlite.quantization.stored_statistics import is_obsolete

PARAMS = "params"

OF_MODELS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    NotImplementedError,
    errors.FlaxError,
)
"""Errors that a model may raise when it is traced."""


class Variables(abc.ABC):
    """The variables of a model, by the names that checkpoints have for them.

    A *template* is what a framework keeps variables in, with shapes in place of arrays.
    """

    framework: ClassVar[str]
    collection: ClassVar[str]
    """First step of the names of parameters."""

    calibrate: ClassVar[str]
    """Function that gathers statistics of activations."""

    def __init__(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]):
        """Names the variables of a model.

        Args:
            model: the model.
            args: sample inputs; shapes will do.
            kwargs: sample inputs by name; shapes will do.
        """
        self.model, self.args, self.kwargs = model, args, dict(kwargs)

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Name of the model, for manifests and messages."""

    @abc.abstractmethod
    def match(self, source: Reader) -> tuple[Any, dict[str, str]]:
        """Finds the variables in a source.

        Returns:
            A template, with the dtypes of the source; and for the name of each variable
            the name in the source.

        Raises:
            CheckpointError: if the source lacks an array, or holds something else.
        """

    @abc.abstractmethod
    def stored(self, manifest: Manifest) -> Any:
        """A template with the dtypes and collections of the source of a checkpoint."""

    @abc.abstractmethod
    def statistics(self, template: Any) -> Any:
        """The statistics of activations, in a tree of their names."""

    @abc.abstractmethod
    def plan(self, template: Any) -> Plan:
        """Plans a conversion."""

    @abc.abstractmethod
    def params(self, plan: Plan, names: Collection[str]) -> list[str]:
        """Names of the parameters, by number."""

    @abc.abstractmethod
    def buffer(self, buffer: Buffer) -> str:
        """Name of a variable that is no parameter."""

    @abc.abstractmethod
    def tree_of(self, serving: Any, names: Collection[str]) -> Any:
        """The serving variables that a checkpoint has.

        Args:
            serving: result of the conversion.
            names: names of the variables that there are.
        """

    @abc.abstractmethod
    def without_samples(self, serving: Any, tree: Any, names: Collection[str]) -> Any:
        """A template of serving variables, without what older checkpoints lack.

        Args:
            serving: result of the conversion.
            tree: what the checkpoint has of it.
            names: names of the arrays of the checkpoint.
        """

    @abc.abstractmethod
    def shardings(
        self, serving: Any, mesh: jax.sharding.Mesh, rules: Any
    ) -> dict[str, jax.sharding.Sharding]:
        """Shardings of the arrays by the model's own partitioning."""

    @abc.abstractmethod
    def filled(
        self, template: Any, names: Collection[str], read: Callable[[str], Any]
    ) -> Any:
        """Reads the arrays of a template.

        Args:
            template: the template.
            names: names of the arrays that there are.
            read: reads one of them.
        """


def untraceable(
    model: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception
) -> CheckpointError:
    """The error that a model raises with the sample inputs."""
    called_with = jax.tree.map(_brief, (*args, *kwargs.values()))
    return CheckpointError(
        f"tracing {model} with the sample inputs {', '.join(map(str, called_with))} "
        "failed; are they of the right shapes and dtypes? "
        f"{type(error).__name__}: {' '.join(str(error).split())}"
    )


def _brief(x: Any) -> Any:
    return str(info_of(x)) if tracing.is_array(x) else x


def differences(source: Reader, name: str, wanted: ArrayInfo) -> list[str]:
    """Says how a leaf of a source differs from a variable; empty if it is equal."""
    if name in source.others:
        return [f"{name} is {source.others[name]}, the model's an array"]
    if name not in source.arrays:
        return [f"{name} is missing"]
    found = source.arrays[name]
    is_equal = found.shape == wanted.shape
    return [] if is_equal else [f"{name} is {found}, the model's is {wanted}"]


def unknown(source: Reader, names: Iterable[str]) -> list[str]:
    """Says what a source holds beside these names."""
    known = set(names)
    wrong = [
        f"{name} is not in the model"
        for name in source.arrays
        if name not in known and not is_obsolete(name, source.arrays)
    ]
    wrong += [
        f"{name} is {description}, and not in the model"
        for name, description in source.others.items()
        if name not in known
    ]
    return wrong


def refuse(wrong: list[str], advice: Callable[[], str]) -> None:
    """Refuses a source that is not of a model.

    Args:
        wrong: differences from the model.
        advice: function that says what to do.

    Raises:
        CheckpointError: if there is something wrong.
    """
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(
            f"the source does not hold the variables of this model: "
            f"{'; '.join(wrong[:5])}{more}{advice()}"
        )


def subtrees_of(wanted: list[str], names: set[str]) -> list[str]:
    """The paths below which a source has all the names that a model wants."""
    if not wanted:
        return []
    first = f"/{wanted[0]}"
    return sorted(
        (
            path
            for path in (n.removesuffix(first) for n in names if n.endswith(first))
            if all(f"{path}/{name}" in names for name in wanted)
        ),
        key=lambda path: (path.split("/")[-1] != PARAMS, path),
    )


def advice_of(options: list[str]) -> str:
    """Advises to select one of some subtrees; empty for none."""
    if not options:
        return ""
    return (
        ". Its parameters are in a subtree, which --subtree (subtree=) names: "
        f"{' or '.join(options)}"
    )
