"""Interface of conversion and loading to the variables of a framework's models."""

import abc
import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import jax
import numpy as np
from flax import errors

from aqtlite.checkpoint.arrays import ArrayInfo
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import Reader
from aqtlite.checkpoint.manifest import Manifest, info_of
from aqtlite.errors import UserError
from aqtlite.jaxpr import tracing
from aqtlite.program.serving.model import Buffer
from aqtlite.program.serving.planning import Plan
from aqtlite.quantization.states.stored_statistics import is_obsolete

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
"""Errors that tracing a model may raise."""


class Variables(abc.ABC):
    """The variables of a model, by their names in checkpoints.

    A *template* is the framework's container of variables (a pytree or a model), with
    abstract values in place of arrays.
    """

    framework: ClassVar[str]
    collection: ClassVar[str]
    """First step of the names of parameters."""

    calibrate: ClassVar[str]
    """Name of the function that gathers statistics of activations, for messages."""

    def __init__(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]):
        """Holds a model and sample inputs.

        Args:
            model: the model.
            args: sample inputs, or their shapes.
            kwargs: sample inputs by name, or their shapes.
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
            A template with the dtypes of the source, and the name in the source of each
            variable, by name in the model.

        Raises:
            CheckpointError: if the source lacks an array, or holds anything else.
        """

    @abc.abstractmethod
    def stored(self, manifest: Manifest) -> Any:
        """A template with the dtypes and collections that the manifest records."""

    @abc.abstractmethod
    def statistics(self, template: Any) -> Any:
        """The statistics of activations in a template, as a tree by name."""

    @abc.abstractmethod
    def gather(self, values: Any, batches: Iterable[Any]) -> dict[str, np.ndarray]:
        """Statistics of activations over batches, by name.

        Args:
            values: the variables of the model, with values.
            batches: as `aqtlite.flax.calibrate_in_float` takes them.

        Raises:
            ValueError: as `aqtlite.flax.calibrate_in_float` does.
        """

    @abc.abstractmethod
    def plan(self, template: Any) -> Plan:
        """Plans a conversion."""

    @abc.abstractmethod
    def params(self, plan: Plan, names: Collection[str]) -> list[str]:
        """Names of the parameters, in the order of their numbers in the plan."""

    @abc.abstractmethod
    def buffer(self, buffer: Buffer) -> str:
        """Name of a variable that is not a parameter."""

    @abc.abstractmethod
    def tree_of(self, serving: Any, names: Collection[str]) -> Any:
        """The serving variables in the tree structure of checkpoints.

        Args:
            serving: result of the conversion.
            names: names of the variables in the checkpoint.
        """

    @abc.abstractmethod
    def without_samples(self, serving: Any, tree: Any, names: Collection[str]) -> Any:
        """A template of serving variables, without samples that a checkpoint lacks.

        Args:
            serving: result of the conversion.
            tree: result of `tree_of`, without the samples that the checkpoint lacks.
            names: names of the arrays in the checkpoint.
        """

    @abc.abstractmethod
    def shardings(
        self, serving: Any, mesh: jax.sharding.Mesh, rules: Any
    ) -> dict[str, jax.sharding.Sharding]:
        """Shardings by name of the array, from the model's own partitioning."""

    @abc.abstractmethod
    def filled(
        self,
        template: Any,
        names: Collection[str],
        read: Callable[[str], Any],
        shardings: Mapping[str, jax.sharding.Sharding],
    ) -> Any:
        """Fills a template with arrays, and with zeros for markers.

        Args:
            template: the template.
            names: names of the arrays that can be read.
            read: function that reads the array of a name.
            shardings: shardings of the markers of frozen parameters, by name.
        """


@contextlib.contextmanager
def tracing_with(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Names the sample inputs in errors of a model that is traced with them.

    Args:
        model: the model.
        args: sample inputs, or their shapes.
        kwargs: sample inputs by name, or their shapes.

    Raises:
        CheckpointError: if the model raises.
        UserError: as raised, if rules or others that the inputs do not matter to do.
    """
    try:
        yield
    except UserError:
        raise
    except OF_MODELS as error:
        called_with = jax.tree.map(_brief, (*args, *kwargs.values()))
        raise CheckpointError(
            f"tracing {type(model).__name__} with the sample inputs "
            f"{', '.join(map(str, called_with))} failed; are they of the right shapes "
            "and dtypes? "
            f"{type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def _brief(x: Any) -> Any:
    return str(info_of(x)) if tracing.is_array(x) else x


def differences(source: Reader, name: str, wanted: ArrayInfo) -> list[str]:
    """Describes how a leaf of a source differs from a variable; empty if they agree."""
    if name in source.others:
        return [f"{name} is {source.others[name]}, the model's an array"]
    if name not in source.arrays:
        return [f"{name} is missing"]
    found = source.arrays[name]
    is_equal = found.shape == wanted.shape
    return [] if is_equal else [f"{name} is {found}, the model's is {wanted}"]


def unknown(source: Reader, names: Iterable[str]) -> list[str]:
    """Describes the leaves of a source that are not among `names`."""
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
    """Raises an error if a source differs from a model.

    Args:
        wrong: descriptions of the differences.
        advice: function that returns advice for the message.

    Raises:
        CheckpointError: if `wrong` is not empty.
    """
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(
            f"the source does not hold the variables of this model: "
            f"{'; '.join(wrong[:5])}{more}{advice()}"
        )


def subtrees_of(
    wanted: Mapping[str, tuple[int, ...]], arrays: Mapping[str, ArrayInfo]
) -> list[str]:
    """The paths below which a source has the wanted variables, and nothing else.

    Args:
        wanted: shapes of the variables by their names below such a path.
        arrays: arrays of the source by name.
    """
    if not wanted:
        return []
    first = f"/{next(iter(wanted))}"
    return sorted(
        (
            path
            for path in (n.removesuffix(first) for n in arrays if n.endswith(first))
            if {f"{path}/{name}": shape for name, shape in wanted.items()}
            == {n: x.shape for n, x in arrays.items() if n.startswith(f"{path}/")}
        ),
        key=lambda path: (path.split("/")[-1] != PARAMS, path),
    )


def advice_to_start(call: str) -> str:
    """Advice for a source without what a quantized model learns; `call` starts it."""
    return (
        ". The quantized model learns them: convert a checkpoint of its training, or "
        f"one saved after {call}"
    )


def advice_of(options: list[str]) -> str:
    """Advice to select one of several subtrees; empty if there are none."""
    if not options:
        return ""
    return (
        ". Its parameters are in a subtree, which --subtree (subtree=) names: "
        f"{' or '.join(options)}"
    )
