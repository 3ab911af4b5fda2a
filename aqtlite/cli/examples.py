"""Calibration examples: arrays of a ``.npz`` file, in batches."""

import pathlib
import re
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.errors import UserError
from aqtlite.jaxpr import tracing

_ONE = np.lib.format.MAGIC_PREFIX
_ARCHIVE = b"PK\3\4", b"PK\5\6"
"""How files of one array, and of several or none, begin."""


class Examples:
    """Batches of a file, each a tuple of positional arguments of the model."""

    def __init__(
        self,
        path: pathlib.Path,
        args: tuple[Any, ...],
        batch_size: int,
        *,
        has_others: bool = False,
    ):
        """Reads the file, and checks it against the arguments of the model.

        Args:
            path: path of the file.
            args: sample arguments, arrays or their shapes. Other arguments are passed
                unchanged in every batch.
            batch_size: number of examples per batch; the last batch may have fewer.
            has_others: whether further arrays, such as labels, may follow those of the
                arguments. They follow the arguments in every batch.

        Raises:
            UserError: if the file cannot be read, does not match the arguments, has no
                examples, or contains NaN or infinity.
        """
        if batch_size < 1:
            raise UserError(f"--batch-size must be at least 1, got {batch_size}")
        self.size = batch_size
        """Number of examples of each batch but the last."""
        self._leaves, self._treedef = jax.tree.flatten(args)
        self._places = [i for i, x in enumerate(self._leaves) if tracing.is_array(x)]
        samples = [self._leaves[i] for i in self._places]
        arrays = _read(path)
        names = sorted(arrays, key=_natural)
        num_others = len(names) - len(samples)
        if num_others < 0 or (num_others and not has_others):
            raise UserError(
                f"{path} holds {len(names)} arrays ({', '.join(names)}), and the "
                f"model takes {len(samples)}: {', '.join(map(_brief, samples))}"
            )
        self._arrays = [
            _checked(f"{path}: {name}", arrays[name], sample)
            for name, sample in zip(names, samples, strict=False)
        ]
        others = names[len(samples) :]
        self._others = [_with_examples(f"{path}: {x}", arrays[x]) for x in others]
        counts = [len(x) for x in (*self._arrays, *self._others)]
        if len(set(counts)) > 1:
            listed = ", ".join(
                f"{n} of {c}" for n, c in zip(names, counts, strict=True)
            )
            raise UserError(f"{path} holds different numbers of examples: {listed}")
        self.count = counts[0]
        """Number of examples."""

    def __len__(self) -> int:
        return -(-self.count // self.size)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for start in range(0, self.count, self.size):
            part = slice(start, start + self.size)
            leaves = list(self._leaves)
            for place, x in zip(self._places, self._arrays, strict=True):
                leaves[place] = jnp.asarray(x[part])
            args = jax.tree.unflatten(self._treedef, leaves)
            yield (*args, *(jnp.asarray(x[part]) for x in self._others))


def _read(path: pathlib.Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file:
            # Of what is neither, NumPy says to unpickle it.
            start = file.read(len(_ONE))
            is_archive = start.startswith(_ARCHIVE) and zipfile.is_zipfile(file)
        if start == _ONE:
            raise UserError(f"{path} holds one array: write it by numpy.savez")
        if not is_archive:
            raise UserError(f"{path} is no whole .npz file: write one by numpy.savez")
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: _one(archive, name, path) for name in archive.files}
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError) as error:
        # RuntimeError: of a compression or encryption that zipfile lacks.
        text = " ".join(str(error).split())
        raise UserError(f"{path} cannot be read: {text}") from error
    for name, x in arrays.items():
        if not isinstance(x, np.ndarray):
            raise UserError(f"{path}: {name} is no array")
    if not arrays:
        raise UserError(f"{path} holds no array: ranges come from data")
    return arrays


def _one(archive: np.lib.npyio.NpzFile, name: str, path: pathlib.Path) -> Any:
    try:
        return archive[name]
    except ValueError as error:
        raise UserError(
            f"{path}: {name} is damaged, or holds objects of Python: write it by "
            "numpy.savez with a dtype of numbers"
        ) from error


def _checked(name: str, x: np.ndarray, sample: Any) -> np.ndarray:
    """Checks an array and casts it to the dtype of the sample argument."""
    shape, dtype = tuple(sample.shape), np.dtype(sample.dtype)
    if not shape:
        raise UserError(
            f"an argument of the model is {_brief(sample)}, which has no axis that "
            "counts examples: make it a constant of the model"
        )
    if x.shape[1:] != shape[1:] or x.ndim != len(shape):
        wanted = ", ".join(map(str, ("N", *shape[1:])))
        raise UserError(
            f"{name} is {_brief(x)}; the model takes {dtype}[{wanted}], and arrays are "
            "taken in the order of their names"
        )
    if not len(x):
        raise UserError(f"{name} holds no example: ranges come from data")
    if _kind(x.dtype) != _kind(dtype):
        raise UserError(
            f"{name} is {x.dtype.name}, and the model takes {dtype.name}: write it as "
            "the model is given it in training"
        )
    with np.errstate(over="ignore"):  # Infinities are found below.
        cast = x.astype(dtype)
    finite = np.isfinite(cast.reshape(len(cast), -1)).all(axis=1)
    if not finite.all():
        raise UserError(f"{name} holds NaN or infinities, in example {finite.argmin()}")
    if _kind(dtype) == "integer" and (cast != x).any():
        raise UserError(f"{name} holds integers that are too large for {dtype.name}")
    return cast


def _with_examples(name: str, x: np.ndarray) -> np.ndarray:
    """Checks that an array for the loss has an axis of examples."""
    if not x.ndim or not len(x):
        raise UserError(f"{name} holds no example: its first axis counts them")
    return x


def _kind(dtype: np.dtype) -> str:
    if jnp.issubdtype(dtype, jnp.floating):
        return "float"
    return "integer" if jnp.issubdtype(dtype, jnp.integer) else dtype.name


def _brief(x: Any) -> str:
    return f"{np.dtype(x.dtype).name}[{', '.join(map(str, x.shape))}]"


def _natural(name: str) -> list[tuple[str, int]]:
    """Sort key of natural order, in which ``x10`` follows ``x9``."""
    return [(text, int(n or 0)) for text, n in re.findall(r"(\D*)(\d*)", name)]
