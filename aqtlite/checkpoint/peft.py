"""LoRA adapters in the files of PEFT: ``adapter_config.json`` and safetensors.

A file has ``lora_A``, (rank, inputs), and ``lora_B``, (outputs, rank), for each linear
layer, and of DoRA ``lora_magnitude_vector``, (outputs). The adapters of rules have the
contracted axes of a weight before the rank, and the rank before the others: both are
the transposed matrix in another shape.
"""

import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import config
from aqtlite.checkpoint.arrays import ArrayInfo, LazyArray, is_finite
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import local_path
from aqtlite.checkpoint.formats.safetensors import SafetensorsWriter
from aqtlite.checkpoint.move import Move
from aqtlite.checkpoint.names import name_of
from aqtlite.checkpoint.new_path import new_path
from aqtlite.checkpoint.one_process import own
from aqtlite.checkpoint.peft_place import MAGNITUDE, NAMES, STACKED, Place, place_of
from aqtlite.checkpoint.quantized_formats.safetensors import SafetensorsTensors
from aqtlite.checkpoint.quantized_formats.settings import Settings, read_json

_CONFIG, _FILE = "adapter_config.json", "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_PREFIX = "base_model.model."
_KEY = re.compile(
    re.escape(_PREFIX)
    + rf"(?P<module>.+)\.({'|'.join(map(re.escape, NAMES.values()))})"
)
_BY_MODULE = "rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform"
_OF_OTHER_PARTS = (
    *("layer_replication", "trainable_token_indices", "target_parameters"),
    *("alora_invocation_tokens", "arrow_config"),
)
_EMPTY = {
    **dict.fromkeys(_BY_MODULE, "one rule has one rank and alpha"),
    **dict.fromkeys(_OF_OTHER_PARTS, "adapters are those of linear layers"),
}
"""Why fields are to be empty: those for modules with a rank of their own, or that are
trained as a whole, and for other layers, other parameters, and some tokens."""

_KEEPING = None, True, False, "gaussian", "eva", "orthogonal"
"""Ways to start that leave the weights as they are."""


def peft_config(path: str | os.PathLike) -> config.Lora:
    """Reads the config of adapters that PEFT has written.

    Args:
        path: a folder with ``adapter_config.json``.

    Raises:
        CheckpointError: if there is none, or for adapters of another kind: other ranks
            for some modules, trained biases, modules trained as a whole, or a start
            that changed the weights (PiSSA, OLoRA).
    """
    settings = Settings(read_json(pathlib.Path(path, _CONFIG)), _CONFIG)
    settings.one_of("peft_type", ("LORA",))
    settings.one_of("bias", ("none",), "none")
    for name in ("lora_bias", "use_qalora", "use_bdlora"):
        settings.one_of(name, (False,), False)
    for name, why in _EMPTY.items():
        if settings.values.get(name):
            raise settings.wrong(name, f"empty: {why}")
    if settings.values.get("init_lora_weights") not in _KEEPING:
        raise settings.wrong(
            "init_lora_weights",
            f"one of {', '.join(map(repr, _KEEPING[1:]))}, as others change the "
            "weights: PEFT writes the adapter for those of before with "
            "save_pretrained(..., path_initial_model_for_weight_conversion=)",
        )
    fields = {}
    for name, default in (("lora_alpha", 8), ("lora_dropout", 0.0)):
        fields[name] = settings.values.get(name, default)
        if isinstance(fields[name], bool) or not isinstance(fields[name], int | float):
            raise settings.wrong(name, "a number")
    kind = config.Dora if settings.flag("use_dora", False) else config.Lora
    rank = settings.integer("r", 1)
    is_rank_stabilized = settings.flag("use_rslora", False)
    try:
        return kind(
            rank,
            fields["lora_alpha"],
            fields["lora_dropout"],
            is_rank_stabilized=is_rank_stabilized,
        )
    except ValueError as error:
        raise CheckpointError(f"{_CONFIG}: {error}") from error


def load_peft(
    path: str | os.PathLike,
    adapters: Any,
    *,
    moves: Sequence[Move] = (),
    lora: config.Lora | None = None,
) -> Any:
    """Reads adapters that PEFT has written.

    >>> import pathlib, tempfile
    >>> import aqtlite
    >>> rule = aqtlite.Rule(cfg=None, adapter=config.Lora(rank=2, alpha=4))
    >>> fn = aqtlite.quantize_function(lambda p, x: x @ p["fc"], [rule], params=0)
    >>> state = fn.init_state({"fc": jnp.ones((3, 4))}, jnp.ones((1, 3)))
    >>> path = pathlib.Path(tempfile.mkdtemp(), "adapter")
    >>> save_peft(path, state["params"], rule.adapter)
    >>> loaded = load_peft(path, state["params"], lora=rule.adapter)
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
        lora: the rule's adapter, to be compared with the file's, whose `scale` the
            arrays do not show. None for a rule that was made by `peft_config`.

    Returns:
        A tree like `adapters`, of float32.

    Raises:
        CheckpointError: as for `peft_config`; if an adapter is only in the file or only
            in the tree, if shapes or scales differ, if values are not finite, or if a
            weight is joined of several.
    """
    of_file = peft_config(path)
    if lora is not None:
        _check_alike(lora, of_file)
    tensors = _opened(pathlib.Path(path))
    for key in tensors.infos:
        if _KEY.fullmatch(key) is None:
            raise CheckpointError(
                f"{_FILE} has {key}, which is no part of an adapter of a layer"
            )
    unused = set(tensors.infos)
    leaves, treedef = jax.tree.flatten_with_path(adapters)
    places = [place_of(key_path, moves, np.shape(leaf)) for key_path, leaf in leaves]
    if isinstance(of_file, config.Dora):
        _check_magnitudes(
            places, f"{_CONFIG} is of {of_file!r}: make the rule with peft_config(path)"
        )
    made = []
    for place, (_, leaf) in zip(places, leaves, strict=True):
        layers = []
        for module in place.modules:
            key = f"{_PREFIX}{module}.{NAMES[place.name]}"
            if key not in tensors.infos:
                raise CheckpointError(
                    f"{_FILE} has no {key} for the adapter {place.path}"
                )
            unused.discard(key)
            x = tensors.read(key)
            if not is_finite(x):
                raise CheckpointError(f"{key} in {_FILE} holds NaN or infinities")
            layers.append(place.read(key, x, of_file.rank))
        stacked = np.stack(layers) if place.is_stacked else layers[0]
        if stacked.shape != place.shape_in_file(np.shape(leaf)):
            raise CheckpointError(
                f"{key} in {_FILE} has the shape {x.shape}, and {place.name} of "
                f"{place.path} the shape {np.shape(leaf)}"
            )
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
    initial: Any = None,
) -> None:
    """Writes adapters as PEFT reads them, in float32 without rounding.

    An adapter is for the weights beside which it was trained. One that started with
    directions of the weights (``init="pissa"``) is written for the weights as they were
    before, by its difference to what it started from, of twice the rank.

    Args:
        path: folder to be made.
        adapters: as for `load_peft`, all of the rule's rank.
        lora: the rule's adapter.
        moves: as for `load_peft`; a weight that is split into several has one `lora_A`,
            so that they have to be equal.
        base_model: name or path of the model that PEFT loads them for.
        initial: adapters like `adapters`, as they started, to write the difference to
            them; None for the adapters themselves.

    Raises:
        CheckpointError: if the path exists, if an adapter has no place in the file, has
            parts in other processes, or is not finite, or for ``init="pissa"`` without
            `initial`.
        UnwritableError: if the disk is full, or the folder cannot be written into.
    """
    own(adapters, "adapters"), own(initial, "initial")
    if lora.init == "pissa" and initial is None:
        raise CheckpointError(
            f"adapters of {lora!r} are for what remained of the weights: give "
            "initial=, the adapters as they started, to write them for the weights as "
            "they were; or lora with init='zero', for a base saved as it remained"
        )
    arrays = _written(adapters, lora, moves, initial)
    of_file = lora if initial is None else _of_twice_the_rank(lora)
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": base_model,
        "task_type": None,
        "inference_mode": True,
        "r": of_file.rank,
        "lora_alpha": of_file.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.is_rank_stabilized,
        "use_dora": isinstance(lora, config.Dora),
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted({_KEY.fullmatch(key)["module"] for key in arrays}),  # type: ignore[index]
    }
    with new_path(local_path(path)) as folder:
        folder.mkdir()
        SafetensorsWriter().write(folder / _FILE, list(_lazy(arrays)), str)
        (folder / _CONFIG).write_text(json.dumps(settings, indent=2) + "\n")


def _written(
    adapters: Any, lora: config.Lora, moves: Sequence[Move], initial: Any
) -> dict[str, np.ndarray]:
    """Makes the matrices of a file, by key; arguments as for `save_peft`."""
    is_dora = isinstance(lora, config.Dora)
    leaves = jax.tree.leaves_with_path(adapters)
    places = [place_of(key_path, moves, np.shape(leaf)) for key_path, leaf in leaves]
    if is_dora:
        _check_magnitudes(
            places, f"the adapter is {lora!r}: give the rule's config.Lora"
        )
    _check_not_stacked(places, [np.shape(leaf) for _, leaf in leaves], lora.rank)
    arrays: dict[str, np.ndarray] = {}
    parts: dict[str, dict[int, np.ndarray]] = {}
    starts = _starts(adapters, initial)
    for place, (_, leaf), start in zip(places, leaves, starts, strict=True):
        x = np.asarray(leaf, np.float32)
        if not is_finite(x) or (start is not None and not is_finite(start)):
            raise CheckpointError(
                f"{place.name} of {place.path} holds NaN or infinities: its training "
                "diverged, or started from them"
            )
        if place.name == MAGNITUDE and not is_dora:
            raise CheckpointError(
                f"{place.path} has magnitudes, and the adapter is {lora!r}: give the "
                "rule's config.Dora"
            )
        for i, module in enumerate(place.modules):
            key = f"{_PREFIX}{module}.{NAMES[place.name]}"
            at = i if place.is_stacked else ...
            matrix = place.written(x[at], lora.rank)
            if start is not None:
                start_of_one = place.written(start[at], lora.rank)
                matrix = place.difference(matrix, start_of_one)
            if place.name != "lora_a":
                parts.setdefault(key, {})[place.part] = matrix
            elif not np.array_equal(arrays.setdefault(key, matrix), matrix):
                raise CheckpointError(
                    f"{key} is one matrix, and {place.path} and others have each their "
                    "own: PEFT has one adapter for each module, and none for weights "
                    "that are split, or for the experts of a module"
                )
    for key, by_part in parts.items():
        arrays[key] = np.concatenate([by_part[part] for part in sorted(by_part)])
    return arrays


def _opened(folder: pathlib.Path) -> SafetensorsTensors:
    """Opens the file of adapters."""
    file = folder / _FILE
    if not file.is_file():
        why = ""
        if (folder / _PICKLE).exists():
            why = (
                f", and {_PICKLE} is not read: it is a pickle, which runs code. Load "
                "it with PEFT, and save it again (save_pretrained)"
            )
        raise CheckpointError(f"{folder} has no {_FILE}{why}")
    return SafetensorsTensors(file)


def _check_alike(lora: config.Lora, of_file: config.Lora) -> None:
    """Raises CheckpointError if a rule's adapter is another than that of a file."""
    is_alike = (
        lora.rank == of_file.rank
        and math.isclose(lora.scale, of_file.scale, rel_tol=1e-6)
        and isinstance(lora, config.Dora) == isinstance(of_file, config.Dora)
    )
    if not is_alike:
        raise CheckpointError(
            f"{_CONFIG} is of {of_file!r}, of scale {of_file.scale:g}, and the rule's "
            f"adapter is {lora!r}, of scale {lora.scale:g}: make the rule with "
            "peft_config(path)"
        )


def _check_magnitudes(places: Sequence[Place], of_dora: str) -> None:
    """Raises CheckpointError if a layer's adapter has no magnitudes.

    Args:
        places: where all parameters of adapters are.
        of_dora: what says that they are, and what to do, for the message.
    """
    layers = {place.path for place in places if place.name == MAGNITUDE}
    for place in places:
        if place.path not in layers:
            raise CheckpointError(f"{place.path} has no magnitudes, and {of_dora}")


def _check_not_stacked(
    places: Sequence[Place], shapes: Sequence[tuple[int, ...]], rank: int
) -> None:
    """Raises CheckpointError for adapters of stacked layers, as many as the rank.

    `Place.written` refuses other numbers by the axis that has to have the rank.
    """
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for place, shape in zip(places, shapes, strict=True):
        one = shape[1:] if place.is_stacked else shape
        found.setdefault(place.path, {})[place.name] = one
    for path, by_name in found.items():
        a, b = by_name.get("lora_a", ()), by_name.get("lora_b", ())
        if min(len(a), len(b)) > 2 and a[0] == b[0] == b[1] == rank:
            raise CheckpointError(
                f"lora_a and lora_b of {path} have the shapes {a} and {b}, and the "
                f"rank is {rank}: {STACKED}"
            )


def _of_twice_the_rank(lora: config.Lora) -> config.Lora:
    """Returns an adapter of the same scale."""
    factor = math.sqrt(2) if lora.is_rank_stabilized else 2
    return dataclasses.replace(lora, rank=2 * lora.rank, alpha=factor * lora.alpha)


def _starts(adapters: Any, initial: Any) -> list[np.ndarray | None]:
    """Returns what each adapter started from; None where that is not subtracted."""
    if initial is None:
        return [None] * len(jax.tree.leaves(adapters))
    shapes, wanted = (
        [(path, np.shape(x)) for path, x in jax.tree.leaves_with_path(tree)]
        for tree in (initial, adapters)
    )
    if shapes != wanted:
        raise CheckpointError("initial is no tree of arrays like the adapters")
    return [np.asarray(start, np.float32) for start in jax.tree.leaves(initial)]


def _lazy(arrays: dict[str, np.ndarray]) -> Iterator[LazyArray]:
    for key, x in sorted(arrays.items()):
        info = ArrayInfo(x.shape, x.dtype)
        yield LazyArray(name_of(key.split(".")), info, lambda x=x: x)  # type: ignore[misc]
