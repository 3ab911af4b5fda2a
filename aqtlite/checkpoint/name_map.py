"""A map from the names of a source to the variables of a model, as a table.

Each line (`Move`) joins, splits, transposes, reshapes and stacks weights. All lines are
checked against all names and shapes before a weight is read.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.filling import names_of
from aqtlite.checkpoint.move import Move
from aqtlite.checkpoint.placeholders import filled, pattern_of
from aqtlite.checkpoint.read_quantized import QuantizedCheckpoint
from aqtlite.qtensor import shape_operations
from aqtlite.qtensor.qtensor import QTensor

_Weight = QTensor | np.ndarray | jax.Array
_Binding = tuple[tuple[str, str], ...]


class MovedWeights(Mapping[str, _Weight]):
    """Weights by the paths of the variables that they become: a lazy mapping."""

    def __init__(
        self,
        infos: Mapping[str, jax.ShapeDtypeStruct],
        reads: Mapping[str, Callable[[], _Weight]],
        quantized: frozenset[str],
    ):
        self.infos = infos
        """Shapes and dtypes of the weights, those of quantized ones in float32."""
        self.quantized = quantized
        """Names of the weights that quantized ones are moved to."""
        self._reads = reads

    def __getitem__(self, name: str) -> _Weight:
        return self._reads[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._reads)

    def __len__(self) -> int:
        return len(self._reads)


def move_weights(
    weights: Mapping[str, _Weight],
    moves: Sequence[Move],
    variables: Any = None,
) -> MovedWeights:
    """Moves the weights of a source to the variables of a model.

    Quantized weights keep their integers where they are only moved; where blocks would
    be cut, they are dequantized.

    >>> weights = {"fc.weight": np.ones((3, 2)), "fc.bias": np.ones(3)}
    >>> shape = jax.ShapeDtypeStruct
    >>> variables = {
    ...     "fc": {"kernel": shape((2, 3), "float32"), "bias": shape((3,), "float32")}
    ... }
    >>> moves = [
    ...     Move(sources="{layer}.weight", targets="{layer}/kernel", axes=(1, 0)),
    ...     Move(sources="{layer}.bias", targets="{layer}/bias"),
    ... ]
    >>> moved = move_weights(weights, moves, variables)
    >>> {name: x.shape for name, x in moved.items()}
    {'fc/kernel': (2, 3), 'fc/bias': (3,)}

    Args:
        weights: weights by name, such as `load_quantized` returns.
        moves: the map.
        variables: pytree of arrays or shapes, to be filled completely; None for
            whatever the map makes.

    Returns:
        A mapping from paths to weights, each read when it is asked for.

    Raises:
        CheckpointError: if a name of the source fits no line, a variable is made by no
            line or by two, or a shape is another.
    """
    known = _infos_of(weights)
    plans: dict[str, _Plan] = {}
    used: set[str] = set()
    for move in moves:
        if not move.targets:
            patterns = [pattern_of(name) for name in move.sources]
            used |= {x for x in known if any(p.fullmatch(x) for p in patterns)}
            continue
        for target, plan in _plans(move, known):
            if target in plans:
                raise CheckpointError(f"two lines of the map make {target}")
            plans[target] = plan
            used.update(name for names in plan.sources for name in names)
    for name in known:
        if name not in used:
            raise CheckpointError(
                f"no line of the map moves {name}; add one, with targets=() if it "
                "is not used"
            )
    infos = {name: plan.info(known, name) for name, plan in plans.items()}
    if variables is not None:
        names = names_of(variables).values()
        shapes = (x.shape for x in jax.tree.leaves(variables))
        _check_complete(infos, dict(zip(names, shapes, strict=True)))
    reads = {name: plan.reader(weights) for name, plan in plans.items()}
    integers = _quantized(weights)
    moved = (
        target
        for target, plan in plans.items()
        if any(name in integers for names in plan.sources for name in names)
    )
    return MovedWeights(infos, reads, frozenset(moved))


def _check_complete(
    infos: Mapping[str, jax.ShapeDtypeStruct], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    for target in (*wanted, *infos):
        if target not in infos:
            raise CheckpointError(f"no line of the map makes the variable {target}")
        if target not in wanted:
            raise CheckpointError(f"the map makes {target}, which is no variable")
    for target, info in infos.items():
        if info.shape != wanted[target]:
            raise CheckpointError(
                f"the map makes {target} of shape {info.shape}, and the variable has "
                f"{wanted[target]}"
            )


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How one variable is made."""

    move: Move
    part: int
    sources: tuple[tuple[str, ...], ...]
    """Names that are joined, for each layer."""

    def info(
        self, infos: Mapping[str, jax.ShapeDtypeStruct], target: str
    ) -> jax.ShapeDtypeStruct:
        """The shape of the variable; raises CheckpointError if there is none."""
        given = [[infos[name] for name in names] for names in self.sources]
        try:
            return jax.eval_shape(self.made, given)
        except (TypeError, ValueError, IndexError) as error:
            text = str(error).partition("\n")[0]
            raise CheckpointError(
                f"{target} cannot be made from {self.sources[0]} of shapes "
                f"{[infos[name].shape for name in self.sources[0]]}: {text}"
            ) from error

    def reader(self, weights: Mapping[str, _Weight]) -> Callable[[], _Weight]:
        """A function that reads the weights and makes the variable."""

        def read() -> _Weight:
            given = [[weights[name] for name in names] for names in self.sources]
            try:
                return self.made(given)
            except (TypeError, ValueError):
                # Blocks are cut, or differ between what is joined.
                floats = [[in_float(x) for x in names] for names in given]
                return self.made(floats)

        return read

    def made(self, given: Sequence[Sequence[Any]]) -> Any:
        """Makes the variable of weights."""
        layers = [self._layer(names) for names in given]
        if self.move.stacked is None:
            return layers[0]
        return _joined([one[None] for one in layers], 0)

    def _layer(self, given: Sequence[Any]) -> Any:
        move = self.move
        x = given[0] if len(given) == 1 else _joined(given, move.join_axis)
        if len(move.targets) > 1:
            x = x[_slice(move, self.part, x.shape)]
        if move.axes is not None:
            x = x.transpose(move.axes)
        return x if move.shape is None else x.reshape(move.shape)


def _slice(move: Move, part: int, shape: tuple[int, ...]) -> tuple[slice, ...]:
    index = [slice(None)] * len(shape)
    index[move.split_axis] = part_of(move, part, shape[move.split_axis])
    return tuple(index)


def part_of(move: Move, part: int, size: int) -> slice:
    """Returns the slice of an axis of some size that one of the targets takes.

    Raises:
        ValueError: if the parts do not make up the axis.
    """
    count = len(move.targets)
    sizes = move.split_sizes or (size // count,) * count
    if len(sizes) != count or sum(sizes) != size:
        raise ValueError(f"parts of {sizes} are not those of an axis of {size}")
    start = sum(sizes[:part])
    return slice(start, start + sizes[part])


def _joined(given: Sequence[Any], axis: int) -> Any:
    if isinstance(given[0], QTensor):
        return shape_operations.concatenate(given, axis)
    if isinstance(given[0], np.ndarray):
        return np.concatenate(given, axis)
    return jnp.concatenate(given, axis)


def in_float(x: _Weight) -> Any:
    """Decodes a weight if it is quantized."""
    return _dequant(x) if isinstance(x, QTensor) else x


_dequant = jax.jit(QTensor.dequant)  # In one loop, where steps would make copies.


def _plans(move: Move, names: Collection[str]) -> Iterator[tuple[str, _Plan]]:
    """The variables that a line makes."""
    found: dict[_Binding, list[str]] = {}
    for source in move.sources:
        pattern = pattern_of(source)
        for name in names:
            match = pattern.fullmatch(name)
            if match is not None:
                binding = tuple(sorted(match.groupdict().items()))
                found.setdefault(binding, []).append(name)
    groups: dict[_Binding, dict[str, tuple[str, ...]]] = {}
    for binding, names in found.items():
        if len(names) != len(move.sources):
            raise CheckpointError(
                f"{names[0]} is joined with others, and of {move.sources} there are "
                f"only {names}"
            )
        rest = tuple(one for one in binding if one[0] != move.stacked)
        layer = dict(binding).get(move.stacked or "", "0")
        groups.setdefault(rest, {})[layer] = tuple(names)
    for rest, layers in groups.items():
        numbers = [str(i) for i in range(len(layers))]
        if set(layers) != set(numbers):
            raise CheckpointError(
                f"{move.sources[0]}: the layers to be stacked are {sorted(layers)}, "
                "and not numbered from 0 on"
            )
        sources = tuple(layers[number] for number in numbers)
        for part, target in enumerate(move.targets):
            yield filled(target, dict(rest)), _Plan(move, part, sources)


def _infos_of(weights: Mapping[str, _Weight]) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes by name, without reading weights that are read lazily."""
    described: Mapping[str, Any] = weights
    if isinstance(weights, QuantizedCheckpoint):
        described = weights.weights
    return {
        name: jax.ShapeDtypeStruct(one.shape, one.dtype)
        for name, one in described.items()
    }


def _quantized(weights: Mapping[str, _Weight]) -> set[str]:
    """Names of the weights that are quantized."""
    if isinstance(weights, QuantizedCheckpoint):
        return {name for name, one in weights.weights.items() if one.is_quantized}
    return {name for name, one in weights.items() if isinstance(one, QTensor)}
