"""A weight of another library's checkpoint, and what all formats need to make one."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from aqtlite.checkpoint.arrays import ArrayInfo
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.numerics import IntAffine, Numerics
from aqtlite.qtensor.qtensor import QTensor

FLOATS = tuple(jnp.dtype(name) for name in ("float32", "float16", "bfloat16"))
E4M3 = jnp.dtype("float8_e4m3fn")
E8M0 = jnp.dtype("float8_e8m0fnu")
UINT8 = np.dtype("uint8")
EXPONENTS = (UINT8, E8M0)
INT8 = np.dtype("int8")
INT32 = np.dtype("int32")

_LONGEST_PATTERN = 1000


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight of a checkpoint, in the source's own orientation; `read` reads it."""

    shape: tuple[int, ...]
    kind: str
    """What it is stored as, such as ``int4, blocks of 1 x 128``."""

    tensors: tuple[str, ...]
    """The tensors of the file that it is spread over."""

    nbytes: int
    """Size of these tensors in the file."""

    read: Callable[[], QTensor | np.ndarray]
    """Reads it; raises CheckpointError for scales and codes that the format lacks."""

    dtype: np.dtype = np.dtype("float32")
    """Dtype of an array, and of what a quantized weight stands for."""

    is_quantized: bool = True
    """Whether it is a `QTensor`; otherwise an array."""

    def __str__(self) -> str:
        kind, _, details = self.kind.partition(", ")
        return f"{kind}{list(self.shape)}{details and f', {details}'}"


class Tensors(Protocol):
    """Tensors of a checkpoint by their own names, read one at a time."""

    @property
    def infos(self) -> Mapping[str, ArrayInfo]:
        """Shapes and dtypes, by name."""

    @property
    def where(self) -> str:
        """The path of the checkpoint, for messages."""

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor."""


def weight(
    tensors: Tensors,
    used: Sequence[str],
    shape: Sequence[int],
    kind: str,
    read: Callable[[], QTensor | np.ndarray],
) -> Weight:
    """Makes a `Weight` of tensors that are there."""
    nbytes = sum(tensors.infos[name].nbytes for name in used)
    return Weight(tuple(shape), kind, tuple(used), nbytes, read)


def require(
    tensors: Tensors,
    name: str,
    dtypes: Sequence[np.dtype],
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> ArrayInfo:
    """Returns the shape and dtype of a tensor.

    Args:
        tensors: the checkpoint.
        name: name of the tensor.
        dtypes: dtypes that the format allows.
        shapes: shapes that the other tensors of the weight allow; None for any.

    Raises:
        CheckpointError: if it is missing, or its dtype or shape is another.
    """
    info = tensors.infos.get(name)
    if info is None:
        raise CheckpointError(
            f"{tensors.where} lacks {name}, without which its weight cannot be read: "
            "the shard that holds it is missing, or the file is damaged"
        )
    if info.dtype not in dtypes:
        names = " or ".join(dtype.name for dtype in dtypes)
        raise CheckpointError(f"{name} in {tensors.where} is {info}, not of {names}")
    if shapes is not None and info.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise CheckpointError(
            f"{name} in {tensors.where} is {info}, and the tensors beside it ask for "
            f"the shape {wanted}"
        )
    return info


def suffixed(tensors: Tensors, suffix: str) -> list[str]:
    """Names of the weights that have a tensor of this suffix, without the suffix."""
    names = (name for name in tensors.infos if name.endswith(suffix))
    return sorted(name.removesuffix(suffix) for name in names)


def matches(pattern: str, module: str) -> bool:
    """Whether a regular expression of the config matches the start of a module's path.

    Raises:
        CheckpointError: if it is none, or too long.
    """
    if len(pattern) > _LONGEST_PATTERN:
        raise CheckpointError(
            f"the pattern {pattern[:40]!r}... of the config is too long"
        )
    try:
        return re.match(pattern, module) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"the pattern {pattern!r} of the config is none: {error}"
        ) from error


def is_listed(module: str, patterns: Sequence[str]) -> bool:
    """Whether a list of modules that stay in float names this one, or one around it."""
    return any(f".{one.strip('.')}." in f".{module}." for one in patterns)


def check_not_listed(module: str, patterns: Sequence[str], key: str) -> None:
    """Refuses a quantized module that the config keeps in float."""
    if is_listed(module, patterns):
        raise kept_in_float(module, key)


def kept_in_float(module: str, key: str) -> CheckpointError:
    """The error for a quantized module that a key of the config keeps in float."""
    return CheckpointError(
        f"{module} is quantized, and {key} of the config says that it is not"
    )


def blocks(size: int, block: int) -> int:
    """The number of blocks along an axis; the last may be smaller."""
    return -(-size // block)


def even(scale: np.ndarray, axis: int, block: int, size: int) -> np.ndarray:
    """Repeats scales along an axis, so that their number divides its size.

    A `QTensor` has blocks of one size. Where the last block is smaller, blocks of the
    greatest common divisor have each one scale of the file.
    """
    if scale.shape[axis] == 1 or size % block == 0:
        return scale
    common = math.gcd(block, size)
    repeated = scale.repeat(block // common, axis)
    kept = [slice(None)] * scale.ndim
    kept[axis] = slice(size // common)
    return repeated[tuple(kept)]


def checked_scale(name: str, scale: np.ndarray, *, signed: bool = False) -> np.ndarray:
    """Returns scales as float32, exactly.

    Raises:
        CheckpointError: if one is NaN, infinite or, without `signed`, negative.
    """
    values = scale.astype(np.float32)
    if not np.isfinite(values).all():
        raise CheckpointError(f"{name} has a scale that is NaN or infinite")
    if not signed and (values < 0).any():
        raise CheckpointError(f"{name} has a negative scale")
    return values


def powers_of_two(name: str, exponents: np.ndarray) -> np.ndarray:
    """Decodes E8M0 scales: byte e is 2^(e - 127).

    Raises:
        CheckpointError: if one is 255, NaN.
    """
    codes = exponents.view(np.uint8)
    if (codes == 255).any():
        raise CheckpointError(f"{name} has the scale NaN (255 in E8M0)")
    return np.ldexp(np.float32(1), codes.astype(np.int32) - 127).astype(np.float32)


def integers(
    values: np.ndarray, bits: int, scale: np.ndarray, zero: np.ndarray | None = None
) -> QTensor:
    """Makes a `QTensor` of signed or unsigned integers.

    Without zero points, those of 4 and 8 bits are plain integers, which contractions
    take with any grid of the same storage; others have a grid that says their width.

    Args:
        values: int8 or uint8.
        bits: their width.
        scale: float32, of the rank of `values`.
        zero: zero points, of the shape of `scale`, or None.
    """
    is_signed = values.dtype == np.int8
    if bits <= 4:
        values = values.astype(jnp.dtype("int4" if is_signed else "uint4"))
    is_plain = bits == 1 or (zero is None and bits in (4, 8))
    return QTensor(
        values,
        scale,
        np.dtype("float32"),
        zero_point=None if zero is None else zero.astype(np.int32),
        numerics=None if is_plain else IntAffine(bits=bits, signed=is_signed),
    )


def on_grid(values: Any, scale: np.ndarray, grid: Numerics) -> QTensor:
    """Makes a `QTensor` of floats or codes on a grid."""
    return QTensor(values, scale, np.dtype("float32"), numerics=grid)


def block_text(shape: Sequence[int], scale_shape: Sequence[int]) -> str:
    """Describes how many elements share a scale, such as ``blocks of 1 x 128``."""
    sizes = [
        size if count == 1 else blocks(size, count)
        for size, count in zip(shape, scale_shape, strict=True)
    ]
    if math.prod(scale_shape) == 1:
        return "one scale"
    return f"blocks of {' x '.join(map(str, sizes))}"
