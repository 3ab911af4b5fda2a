"""One line of a map from the names of a source to the variables of a model."""

import dataclasses
import json
from collections.abc import Sequence

from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.placeholders import placeholders


@dataclasses.dataclass(frozen=True, kw_only=True)
class Move:
    """One line of a map: weights of a source, and the variables that they become.

    Names have placeholders such as ``{i}``, which stand for one or more letters, digits
    or underscores. A placeholder that the targets lack counts layers from
    0 on, which are stacked along a new first axis.

    >>> Move(
    ...     sources="model.layers.{i}.mlp.up_proj.weight",
    ...     targets="params/layers_{i}/up/kernel",
    ...     axes=(1, 0),
    ... ).axes
    (1, 0)

    Raises:
        ValueError: if there is no source, or placeholders do not fit.
    """

    sources: tuple[str, ...] | str
    """Names of weights. Several are joined along `join_axis`, as q, k and v are."""

    targets: tuple[str, ...] | str
    """Paths of variables, joined by slashes. A weight is split along `split_axis` into
    several. None: the weights of the source are not used."""

    join_axis: int = 0
    split_axis: int = 0

    split_sizes: tuple[int, ...] | None = None
    """Sizes of the parts; None for equal ones."""

    axes: tuple[int, ...] | None = None
    """Permutation of the axes of a weight or part; None to keep them."""

    shape: tuple[int, ...] | None = None
    """New shape after that, with at most one -1; None to keep it."""

    def __post_init__(self) -> None:
        for field in ("sources", "targets"):
            given = getattr(self, field)
            names = (given,) if isinstance(given, str) else tuple(given)
            if not all(isinstance(name, str) for name in names):
                raise ValueError(f"Move.{field} has to be names, got {given!r}")
            object.__setattr__(self, field, names)
        for field in ("split_sizes", "axes", "shape"):
            given = getattr(self, field)
            if given is not None:
                object.__setattr__(self, field, tuple(given))
        sources = {frozenset(placeholders(name)) for name in self.sources}
        targets = {frozenset(placeholders(name)) for name in self.targets}
        if len(sources) != 1 or len(targets) > 1:
            raise ValueError(f"{self!r}: all names of a side have equal placeholders")
        if not targets:
            return
        (source,), (target,) = sources, targets
        if target - source or len(source - target) > 1:
            raise ValueError(
                f"{self!r}: targets have the placeholders of sources, or all but one"
            )

    @property
    def stacked(self) -> str | None:
        """The placeholder whose values are stacked; None if none is."""
        rest = set(placeholders(self.sources[0])) - set(placeholders(self.targets[0]))
        return rest.pop() if rest else None


def moves_from_json(text: str) -> tuple[Move, ...]:
    """Reads a map: a list of objects with the fields of `Move`.

    Raises:
        CheckpointError: if the text is no such list.
    """
    try:
        lines = json.loads(text)
        return tuple(Move(**line) for line in lines)
    except RecursionError as error:
        raise CheckpointError("the map is nested too deeply") from error
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"the map is no list of moves: {error}") from error


def moves_to_json(moves: Sequence[Move]) -> str:
    """Writes a map, as `moves_from_json` reads it."""
    defaults = {field.name: field.default for field in dataclasses.fields(Move)}
    lines = [
        {
            name: value
            for name, value in dataclasses.asdict(move).items()
            if value != defaults[name]
        }
        for move in moves
    ]
    return json.dumps(lines, indent=1)
