"""Stored values of a weight, laid out as a kernel for a platform reads them."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.lowering.forms import panels
from aqtlite.lowering.forms.panels import Panels
from aqtlite.qtensor.laid_out import PackedIntegers


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["panels"],
    meta_fields=["shape_of_one", "contracted", "dtype"],
)
@dataclasses.dataclass(frozen=True)
class PackedValues(PackedIntegers):
    """int4 or int8 in panels, which the kernel of the extra ``cpu`` reads.

    Scans and vmaps slice the leading axes of `panels`.

    >>> x = jnp.arange(-64, 64, dtype=jnp.int8).reshape(4, 32)
    >>> packed = PackedValues.of(jnp.tile(x, (4, 1)), contracted=1)
    >>> packed.shape, packed.panels.shape
    ((16, 32), (1, 512))
    >>> bool((packed.unpacked()[:4] == x).all())
    True
    """

    panels: Any
    """uint8, ``(..., panels, bytes)``, with axes of scans and vmaps first."""

    shape_of_one: tuple[int, ...]
    """Shape of the values without these axes."""

    contracted: int
    """Number of their last axes that are contracted."""

    dtype: np.dtype
    """int4 or int8."""

    @classmethod
    def of(cls, values: Any, contracted: int, leading: int = 0) -> "PackedValues":
        """Packs values.

        Args:
            values: int4 or int8, arrays or shapes; contracted axes last.
            contracted: number of these axes.
            leading: number of axes of scans and vmaps, which are first.
        """
        dtype, shape = np.dtype(values.dtype), values.shape[leading:]
        products = math.prod(shape[len(shape) - contracted :])

        def pack(values: jax.Array) -> jax.Array:
            matrices = values.reshape(-1, math.prod(shape) // products, products)
            packed = jax.vmap(panels.of_weights)(matrices)
            return packed.reshape(*values.shape[:leading], *packed.shape[1:])

        is_shape = isinstance(values, jax.ShapeDtypeStruct)
        run = functools.partial(jax.eval_shape, pack) if is_shape else jax.jit(pack)
        return cls(run(values), shape, contracted, dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.panels.shape[:-2], *self.shape_of_one)

    @property
    def matrix(self) -> Panels:
        """The values as a matrix, of a row for each that is not contracted.

        Raises:
            ValueError: if a scan or vmap sliced an axis that is not the first, or
                sliced none.
        """
        columns = self.shape_of_one[: len(self.shape_of_one) - self.contracted]
        found = Panels(self.panels, math.prod(columns), jnp.iinfo(self.dtype).bits)
        expected = -(-found.columns // panels.PANEL)
        if self.panels.ndim != 2 or len(self.panels) != expected:
            raise ValueError(
                f"a packed weight of shape {self.shape_of_one} has {expected} panels, "
                f"and is given as {self.panels.shape}: the collection of frozen "
                "weights has to be stacked along its first axis "
                "(variable_axes={'aqt': 0}), or converted without packed="
            )
        return found

    def integers(self) -> jax.Array:
        if self.panels.ndim == 2:
            return self.matrix.integers().reshape(self.shape_of_one)
        return jax.vmap(lambda one: one.integers())(self)
