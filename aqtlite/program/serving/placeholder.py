"""The node that stands in place of a frozen parameter.

It has a marker, an array of zeros: as a pytree without leaves, a frozen parameter would
be differentiated without a word. No value is computed from a marker, and what is
differentiated with respect to one raises (`aqtlite.program.serving.guards`).
"""

import dataclasses
import math
from collections.abc import Collection, Iterable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from aqtlite.qtensor.no_arithmetic import NoArithmetic
from aqtlite.shapes.sharding import on_current_mesh


@dataclasses.dataclass(frozen=True)
class Placeholder(NoArithmetic):
    """The static description of a frozen parameter."""

    shape: tuple[int, ...]
    dtype: np.dtype
    number: int = 0
    """Index among the leaves of the parameters."""

    sliced: tuple[bool, ...] = ()
    """For each axis, whether weights are slices along it; ``()`` for none."""

    spec: PartitionSpec | None = None
    """Sharding of the whole parameter, on a mesh with explicit axes."""

    path: str = dataclasses.field(default="", compare=False)
    """Path of the parameter, for messages."""

    marker: Any = dataclasses.field(default=None, compare=False, repr=False)
    """Zeros, a leaf to differentiate with respect to; None for none."""

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding of the parameter on the current mesh."""
        sharding = on_current_mesh(self.spec)
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=sharding)

    def why_unreadable(self) -> str:
        """Returns why nothing reads the values of the parameter, and what to do."""
        return f"parameter {self.path!r} is frozen, and has no values here"

    def arithmetic_error(self) -> TypeError:
        return TypeError(self.why_unreadable())

    def __getitem__(self, index: Any) -> NoReturn:
        """Refuses to be indexed.

        Raises:
            TypeError: always.
        """
        raise self.arithmetic_error()

    def __getattr__(self, name: str) -> NoReturn:
        if not name.startswith("__") and hasattr(jax.Array, name):
            raise AttributeError(self.why_unreadable())
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


def is_placeholder(x: Any) -> bool:
    """Whether a node is a `Placeholder`."""
    return isinstance(x, Placeholder)


def is_frozen(x: Any) -> bool:
    """Whether a node of serving variables is a parameter that was frozen.

    Frozen parameters cannot be trained. Those that a conversion left in float can:
    differentiate with respect to them alone.

    >>> import aqtlite
    >>> from aqtlite import config
    >>> fn_q = aqtlite.quantize_function(
    ...     lambda p, x: x @ p["w"] + p["bias"], config.weight_only(), params=0
    ... )
    >>> params, x = {"w": jnp.ones((8, 4)), "bias": jnp.zeros(4)}, jnp.ones((2, 8))
    >>> serve, serving = aqtlite.convert_function(fn_q, params, x)
    >>> params = serving["params"]
    >>> floats = {k: v for k, v in params.items() if not aqtlite.is_frozen(v)}
    >>> def loss(floats):
    ...     return serve({**serving, "params": {**params, **floats}}, x).sum()
    >>> jax.grad(loss)(floats)
    {'bias': Array([2., 2., 2., 2.], dtype=float32)}

    Args:
        x: the node, or an `nnx.Variable`.
    """
    # What an `nnx.Variable` holds; Linen and functions need no NNX.
    return is_placeholder(x.get_raw_value() if hasattr(x, "get_raw_value") else x)


def marker_of(value: Any, mapped: Collection[int] = ()) -> Any:
    """Returns the marker of a parameter; its shape, if that is what the value is.

    Args:
        value: the parameter, before it is frozen.
        mapped: axes along which transformations slice the parameter, and its marker
            with it.
    """
    shape = tuple(n if i in mapped else 1 for i, n in enumerate(np.shape(value)))
    shape = shape if mapped else ()
    sharding = None
    if not isinstance(value, jax.core.Tracer):
        sharding = getattr(value, "sharding", None)
    whole = None
    if isinstance(sharding, NamedSharding):
        whole = NamedSharding(sharding.mesh, PartitionSpec())
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=whole)
    return jnp.zeros(shape, jnp.float32, device=whole)


def with_zeros(placeholder: Any, sharding: Any = None) -> Any:
    """Returns a `Placeholder` with a marker in place of its shape."""
    shape = placeholder.marker
    zeros = jnp.zeros(shape.shape, shape.dtype, device=sharding)
    return dataclasses.replace(placeholder, marker=zeros)


def without_markers(tree: Any) -> Any:
    """Returns a tree whose placeholders have no markers."""

    def unmarked(x: Any) -> Any:
        return dataclasses.replace(x, marker=None) if is_placeholder(x) else x

    return jax.tree.map(unmarked, tree, is_leaf=is_placeholder)


def sliced_axes(
    shape: tuple[int, ...], weight_shapes: Iterable[tuple[int, ...]]
) -> tuple[bool, ...]:
    """Returns the axes of a parameter along which some weights are slices.

    Args:
        shape: shape of the parameter.
        weight_shapes: shapes of the weights made of the parameter.

    Returns:
        One bool per axis, or ``()`` if no axis is sliced. Axes of equal size cannot be
        told apart: all of them count as sliced.
    """
    sizes: set[int] = set()
    for weight_shape in weight_shapes:
        if math.prod(weight_shape) < math.prod(shape):
            left = list(weight_shape)
            for size in shape:
                if size in left:
                    left.remove(size)
                else:
                    sizes.add(size)
    return none_if_false(tuple(size > 1 and size in sizes for size in shape))


def none_if_false(sliced: tuple[bool, ...]) -> tuple[bool, ...]:
    """Returns `sliced`, or ``()`` if no axis is."""
    return sliced if any(sliced) else ()
