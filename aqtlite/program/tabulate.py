"""Variables as a table of shapes and sizes."""

from typing import Any

import jax
import numpy as np
from rich import filesize

from aqtlite.output.tables import Tables
from aqtlite.program.modules import flax_models
from aqtlite.program.serving.placeholder import without_markers
from aqtlite.qtensor import codes
from aqtlite.qtensor.qtensor import QTensor
from aqtlite.shapes.sharding import describe


def tabulate(variables: Any) -> str:
    """Returns a table of variables with the shapes and sizes of their arrays.

    >>> import flax.linen as nn
    >>> import jax.numpy as jnp
    >>> from aqtlite import config
    >>> from aqtlite.flax import AqtDotGeneral, convert
    >>> dense = nn.Dense(8, dot_general=AqtDotGeneral(config.fully_quantized()))
    >>> x = jnp.ones((2, 64))
    >>> serving = convert(dense, dense.init(jax.random.key(0), x), x)
    >>> print(tabulate(serving))
    path            array                           size
    aqt/kernel/rhs  int8[8,64], scale float32[8,1]  544 bytes
    params/bias     float32[8]                      32 bytes
    (all)           2 arrays                        576 bytes

    Args:
        variables: a pytree of arrays, numbers or shapes (`jax.ShapeDtypeStruct`), such
            as serving variables, or an `nnx.State`.

    Returns:
        The text, which a notebook renders as a table. A `QTensor` counts as one array;
        its size is that of the integers, scales and zero points as a checkpoint keeps
        them: values of 4 bits take half a byte.
    """
    nodes = jax.tree.leaves_with_path(
        jax.tree.map(_as_array, without_markers(variables)), is_leaf=_is_quantized
    )
    unboxed = [(_name(path), flax_models.unboxed(node)) for path, node in nodes]
    rows = [(name, _content(node), codes.stored_bytes(node)) for name, node in unboxed]
    total = sum(size for _, _, size in rows)
    cells = [(path, array, filesize.decimal(size)) for path, array, size in rows]
    count = f"{len(rows)} array{'s' * (len(rows) != 1)}"
    heads = ("path", "array", "size")
    return Tables([[heads, *cells, ("(all)", count, filesize.decimal(total))]])


def _is_quantized(node: Any) -> bool:
    return isinstance(node, QTensor)


def _as_array(leaf: Any) -> Any:
    return leaf if hasattr(leaf, "dtype") else np.asarray(leaf)


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _content(node: Any) -> str:
    if not isinstance(node, QTensor):
        return describe(node)
    parts = [describe(node.qvalue), f"scale {describe(node.scale)}"]
    if node.zero_point is not None:
        parts.append(f"zero point {describe(node.zero_point)}")
    return ", ".join(parts)
