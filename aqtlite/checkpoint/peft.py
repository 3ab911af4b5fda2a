"""LoRA adapters in the files of PEFT: ``adapter_config.json`` and safetensors.

A file has ``lora_A``, (rank, inputs), and ``lora_B``, (outputs, rank), for each linear
layer, and of DoRA ``lora_magnitude_vector``, (outputs). The adapters of rules have the
contracted axes of a weight before the rank, and the rank before the others: both are
the transposed matrix in another shape.
"""

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import config
from aqtlite.checkpoint import name_map
from aqtlite.checkpoint.arrays import ArrayInfo, LazyArray, is_finite
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats.safetensors import SafetensorsWriter
from aqtlite.checkpoint.name_map import Move
from aqtlite.checkpoint.names import name_of, path_name, steps_of
from aqtlite.checkpoint.quantized_formats.safetensors import SafetensorsTensors
from aqtlite.checkpoint.quantized_formats.settings import Settings, read_json
from aqtlite.checkpoint.write_quantized import new_path
from aqtlite.quantization.states.state_collections import ADAPTER, PARAMETERS

_CONFIG, _FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MAGNITUDE = "magnitude"
_NAMES = {
    "lora_a": "lora_A.weight",
    "lora_b": "lora_B.weight",
    _MAGNITUDE: "lora_magnitude_vector",
}
_KEY = re.compile(
    re.escape(_PREFIX)
    + rf"(?P<module>.+)\.({'|'.join(map(re.escape, _NAMES.values()))})"
)
_OTHERS = ("rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform")
"""Fields for modules with a rank of their own, or that are trained as a whole."""


def peft_config(path: str | os.PathLike) -> config.Lora:
    """Reads the config of adapters that PEFT has written.

    Args:
        path: a folder with ``adapter_config.json``.

    Raises:
        CheckpointError: if there is none, or for adapters of another kind: other ranks
            for some modules, trained biases, modules trained as a whole.
    """
    settings = Settings(read_json(pathlib.Path(path, _CONFIG)), _CONFIG)
    settings.one_of("peft_type", ("LORA",))
    settings.one_of("bias", ("none",), "none")
    for name in ("lora_bias", "use_qalora", "use_bdlora"):
        settings.one_of(name, (False,), False)
    for name in _OTHERS:
        if settings.values.get(name):
            raise settings.wrong(name, "empty: one rule has one rank and alpha")
    fields = {}
    for name, default in (("lora_alpha", 8), ("lora_dropout", 0.0)):
        fields[name] = settings.values.get(name, default)
        if isinstance(fields[name], bool) or not isinstance(fields[name], int | float):
            raise settings.wrong(name, "a number")
    try:
        kind = config.Dora if settings.flag("use_dora", False) else config.Lora
        return kind(
            settings.integer("r", 1),
            fields["lora_alpha"],
            fields["lora_dropout"],
            is_rank_stabilized=settings.flag("use_rslora", False),
        )
    except ValueError as error:
        raise CheckpointError(f"{_CONFIG}: {error}") from error


def load_peft(
    path: str | os.PathLike, adapters: Any, *, moves: Sequence[Move] = ()
) -> Any:
    """Reads adapters that PEFT has written.

    >>> import pathlib, tempfile
    >>> import aqtlite
    >>> rule = aqtlite.Rule(cfg=None, adapter=config.Lora(rank=2, alpha=4))
    >>> fn = aqtlite.quantize_function(lambda p, x: x @ p["fc"], [rule], params=0)
    >>> state = fn.init_state({"fc": jnp.ones((3, 4))}, jnp.ones((1, 3)))
    >>> path = pathlib.Path(tempfile.mkdtemp(), "adapter")
    >>> save_peft(path, state["params"], rule.adapter)
    >>> loaded = load_peft(path, state["params"])
    >>> bool((loaded["fc"]["adapter"]["lora_a"] == state["params"]["fc"]["adapter"][
    ...     "lora_a"]).all())
    True

    Args:
        path: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``.
        adapters: adapters of the model, to be replaced completely: of Linen, the result
            of `QuantizedModel.init_adapters`; of NNX, ``nnx.state(model,
            nnx.LoRAParam)``; of a function, ``state["params"]``.
        moves: the map from the weights of PEFT's model to variables, as `move_weights`
            takes it. Empty: a layer has the path of its module here, with dots.

    Returns:
        A tree like `adapters`, of float32.

    Raises:
        CheckpointError: as for `peft_config`; if an adapter is only in the file or only
            in the tree, if shapes differ, if values are not finite, or if a weight is
            joined of several.
    """
    lora = peft_config(path)
    tensors = SafetensorsTensors(pathlib.Path(path, _FILE))
    for key in tensors.infos:
        if _KEY.fullmatch(key) is None:
            raise CheckpointError(
                f"{_FILE} has {key}, which is no part of an adapter of a layer"
            )
    unused = set(tensors.infos)
    leaves, treedef = jax.tree.flatten_with_path(adapters)
    made = []
    for key_path, leaf in leaves:
        place = _place_of(key_path, moves, np.shape(leaf))
        layers = []
        for module in place.modules:
            key = f"{_PREFIX}{module}.{_NAMES[place.name]}"
            if key not in tensors.infos:
                raise CheckpointError(
                    f"{_FILE} has no {key} for the adapter {place.path}"
                )
            unused.discard(key)
            x = tensors.read(key)
            if not is_finite(x):
                raise CheckpointError(f"{key} in {_FILE} holds NaN or infinities")
            layers.append(place.read(key, x, lora.rank))
        stacked = np.stack(layers) if place.is_stacked else layers[0]
        made.append(jnp.asarray(stacked.reshape(np.shape(leaf)), jnp.float32))
    if unused:
        raise CheckpointError(
            f"{_FILE} has {min(unused)}, and the model no adapter for it: add it by a "
            "rule, or a line to the map"
        )
    return jax.tree.unflatten(treedef, made)


def save_peft(
    path: str | os.PathLike,
    adapters: Any,
    lora: config.Lora,
    *,
    moves: Sequence[Move] = (),
    base_model: str = "",
) -> None:
    """Writes adapters as PEFT reads them, in float32 without rounding.

    Args:
        path: folder to be made.
        adapters: as for `load_peft`, all of the rule's rank.
        lora: the rule's adapter.
        moves: as for `load_peft`; a weight that is split into several has one `lora_A`,
            so that they have to be equal.
        base_model: name or path of the model that PEFT loads them for.

    Raises:
        CheckpointError: if the path exists, or an adapter has no place in the file.
    """
    is_dora = isinstance(lora, config.Dora)
    arrays: dict[str, np.ndarray] = {}
    parts: dict[str, dict[int, np.ndarray]] = {}
    for key_path, leaf in jax.tree.leaves_with_path(adapters):
        x = np.asarray(leaf, np.float32)
        place = _place_of(key_path, moves, x.shape)
        if place.name == _MAGNITUDE and not is_dora:
            raise CheckpointError(
                f"{place.path} has magnitudes, and the adapter is {lora!r}: give the "
                "rule's config.Dora"
            )
        layers = x if place.is_stacked else x[None]
        for module, layer in zip(place.modules, layers, strict=True):
            key = f"{_PREFIX}{module}.{_NAMES[place.name]}"
            matrix = place.written(layer, lora.rank)
            if place.name != "lora_a":
                parts.setdefault(key, {})[place.part] = matrix
            elif not np.array_equal(arrays.setdefault(key, matrix), matrix):
                raise CheckpointError(
                    f"{key} is one matrix, and its parts {place.path} and others have "
                    "each their own: write adapters of weights that are not split"
                )
    for key, by_part in parts.items():
        arrays[key] = np.concatenate([by_part[part] for part in sorted(by_part)])
    modules = sorted({_KEY.fullmatch(key)["module"] for key in arrays})  # type: ignore[index]
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": base_model,
        "task_type": None,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.is_rank_stabilized,
        "use_dora": is_dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": modules,
    }
    with new_path(pathlib.Path(path)) as folder:
        folder.mkdir()
        SafetensorsWriter().write(folder / _FILE, list(_lazy(arrays)), str)
        (folder / _CONFIG).write_text(json.dumps(settings, indent=2) + "\n")


def _lazy(arrays: dict[str, np.ndarray]) -> Iterator[LazyArray]:
    for key, x in sorted(arrays.items()):
        info = ArrayInfo(x.shape, x.dtype)
        yield LazyArray(name_of(key.split(".")), info, lambda x=x: x)  # type: ignore[misc]


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where the parameter of an adapter is in a file."""

    path: str
    """Path of its module or weight in the model."""

    name: str
    """``lora_a``, ``lora_b`` or ``magnitude``."""

    modules: tuple[str, ...]
    """Modules of PEFT's model, one for each layer."""

    is_stacked: bool
    move: Move | None
    part: int

    def read(self, key: str, x: np.ndarray, rank: int) -> np.ndarray:
        """Returns a matrix of the file as the rank and one other axis, transposed."""
        if self.name == _MAGNITUDE:
            if x.ndim != 1:
                raise CheckpointError(f"{key} has the shape {x.shape}, no vector")
            return x[self._part(len(x))].astype(np.float32)
        axis = 0 if self.name == "lora_a" else 1
        if x.ndim != 2 or x.shape[axis] != rank:
            raise CheckpointError(
                f"{key} has the shape {x.shape}, which is no matrix of rank {rank}"
            )
        if self.name == "lora_b":
            x = x[self._part(len(x))]
        return x.T.astype(np.float32)

    def _part(self, outputs: int) -> slice:
        if self.move is None:
            return slice(None)
        return name_map.part_of(self.move, self.part, outputs)

    def written(self, x: np.ndarray, rank: int) -> np.ndarray:
        """Returns a parameter as the matrix of the file."""
        if self.name == _MAGNITUDE:
            return x.reshape(-1)
        axis = -1 if self.name == "lora_a" else 0
        if x.shape[axis] != rank:
            raise CheckpointError(
                f"{self.name} of {self.path} has the shape {x.shape}, and the rank is "
                f"{rank}"
            )
        matrix = x.reshape(-1, rank) if axis else x.reshape(rank, -1)
        return np.ascontiguousarray(matrix.T)


def _place_of(
    key_path: tuple[Any, ...], moves: Sequence[Move], shape: tuple[int, ...]
) -> _Place:
    """Returns where a leaf of a tree of adapters is in a file.

    Raises:
        CheckpointError: if no line of the map, or several, make its weight.
    """
    steps = steps_of(path_name(key_path))
    at = steps.index(ADAPTER) if ADAPTER in steps[:-1] else 0
    # A box of sharding metadata may follow.
    name = steps[at + 1] if at else ""
    if not at or name not in _NAMES:
        raise CheckpointError(f"{'/'.join(steps)} is no parameter of an adapter")
    above = steps[: at - 1] if steps[at - 1].startswith("aqt_") else steps[:at]
    if above[:2] == ("aqt", "learned"):  # Of NNX, in the attribute of a model.
        above = above[2:]
    path = "/".join(above).removeprefix(f"{PARAMETERS}/")
    if not moves:
        return _Place(path, name, (path.replace("/", "."),), False, None, 0)
    found = []
    for move in moves:
        for part, target in enumerate(move.targets):
            target = target.removeprefix(f"{PARAMETERS}/")
            for one in {target, target.rpartition("/")[0]} - {""}:
                match = name_map.pattern_of(one).fullmatch(path)
                if match is not None and _is_matrix(move):
                    found.append((move, part, match.groupdict()))
    if len(found) != 1:
        count = "no line" if not found else f"{len(found)} lines"
        raise CheckpointError(f"{count} of the map make the weight of {path}")
    ((move, part, values),) = found
    if len(move.sources) > 1:
        raise CheckpointError(
            f"the weight of {path} is joined of {move.sources}, whose adapters have "
            "no common matrix"
        )
    source = move.sources[0]
    names = (
        [name_map.filled(source, values)]
        if move.stacked is None
        else [
            name_map.filled(source, {**values, move.stacked: str(i)})
            for i in range(shape[0])
        ]
    )
    modules = tuple(one.removesuffix(".weight") for one in names)
    return _Place(path, name, modules, move.stacked is not None, move, part)


def _is_matrix(move: Move) -> bool:
    """Whether a line moves weights, not the biases beside them."""
    return not any(source.endswith(".bias") for source in move.sources)
