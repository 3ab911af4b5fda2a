"""Products whose kernel rounds rows of floats itself, in calls with packed variables.

XLA:CPU quantizes rows in three loops: their largest magnitudes, the scales, and the
integers. To start a loop takes as long as a product of small weights.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.extend.core import primitives

from aqtlite import calibration, config, numerics
from aqtlite.contraction import poison
from aqtlite.jaxpr import equations, sites
from aqtlite.jaxpr.replacement import Location, Replacement, Replacements
from aqtlite.jaxpr.sites import Site
from aqtlite.lowering import exact, target
from aqtlite.lowering.forms.packed_dot import Panels
from aqtlite.lowering.packing import Packed, Packing
from aqtlite.lowering.row_grid import Grid, OwnScales
from aqtlite.operations import OperandAxes
from aqtlite.quantization import barriers, quantizer, zero_channels
from aqtlite.shapes.sharding import shape_of

_JIT = primitives.jit_p.name

# Equations that hand on their input.
_SAME = primitives.name_p.name, "stop_gradient"

# The kernel rounds rows on one thread, which takes less time than XLA's loops: .07 to
# .15 ns for an element.
_ROWS = 512

# Paths of the operands of a forward contraction, whose scales of zeros differ.
_PATHS = "fwd.lhs", "fwd.rhs"


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of packed weights, and the quantization of its rows."""

    site: Site
    """The product."""

    packing: Panels

    rounding: Site
    """The quantization of the rows, which are its first input."""

    grid: Grid

    ends: Site | None
    """The search for NaN in rows of a given scale, if there is one."""

    barriers: tuple[Site, ...]
    """Barriers behind what the kernel finds, which it makes superfluous."""

    @property
    def scale_inputs(self) -> frozenset[int]:
        """Indices of the inputs of the call that make a given scale."""
        _, *scales = self.rounding.operands
        return frozenset().union(*(one.inputs for one in scales))

    def replacements(self, weights: Replacement) -> Replacements:
        """Returns replacements of the quantization, the product and what is between.

        The kernel is called in place of the quantization, which comes first. The others
        take what it returned, as they are evaluated behind it, in the same body.

        Args:
            weights: replacement of the product alone, whose weights are packed.
        """
        made: dict[str, jax.Array] = {}

        def round_and_sum(values: Sequence[Any], packed: Packed) -> tuple[Any, None]:
            x, *others = values
            has_own = self.grid.own_scales is not None
            # A range of statistics may stand before the scale.
            scale = [] if has_own else others[-1:]
            made["sums"], made["of rows"] = self.packing.run_rounding(
                packed, exact.float32(x), self.grid, *scale
            )
            # XLA drops what nothing reads, as the integers mostly are.
            whole, found = core.jaxpr_as_fun(_body(self.rounding.eqn))(*values)
            return [whole, made["of rows"] if has_own else found], None

        def instead(function: Callable[[Sequence[Any]], Any]) -> Replacement:
            """Replaces an equation of one result by a function of its inputs."""

            def run(values: Sequence[Any], given: None) -> tuple[list[Any], None]:
                del given
                return [function(values)], None

            return dataclasses.replace(weights, function=run, given=None)

        replaced = {
            self.rounding.location: dataclasses.replace(
                weights, function=round_and_sum
            ),
            self.site.location: instead(lambda values: made["sums"]),
        }
        if self.ends is not None:
            replaced[self.ends.location] = instead(lambda values: made["of rows"])
        for barrier in self.barriers:
            replaced[barrier.location] = instead(lambda values: values[0])
        return replaced


def find(
    closed: core.ClosedJaxpr, products: Iterable[tuple[Site, Packing]]
) -> list[Product]:
    """Returns the products whose rows are the plain quantization of floats.

    Args:
        closed: a call.
        products: equations of the call that contract packed weights.
    """
    by_kernel = [(x, how) for x, how in products if isinstance(how, Panels)]
    if not by_kernel:
        return []
    around = sites.find(closed, {}, (_JIT, *_SAME, target.PRIMITIVE)).contractions
    bodies: dict[Location, _Body] = collections.defaultdict(_Body)
    for one in around:
        bodies[one.location[:-1]].add(one)
    found: dict[Location, list[Product]] = {}
    for site, packing in by_kernel:
        product = _find(site, packing, bodies[site.location[:-1]])
        if product is not None:
            found.setdefault(product.rounding.location, []).append(product)
    # Rows of several products are rounded once.
    return [of[0] for of in found.values() if len(of) == 1]


class _Body:
    """The equations of a jaxpr, in their order, by what they make and read."""

    def __init__(self) -> None:
        self.makers: dict[Any, Site] = {}
        self.readers: dict[Any, list[Site]] = collections.defaultdict(list)
        """Equations by the `source` of their first input."""

    def add(self, site: Site) -> None:
        self.makers.update((var, site) for var in site.eqn.outvars)
        for first in map(self.source, site.eqn.invars[:1]):
            if first is not None:
                self.readers[first].append(site)

    def source(self, atom: Any) -> Any:
        """The variable that names and the like hand on; None for a number."""
        if not isinstance(atom, core.Var):
            return None
        maker = self.makers.get(atom)
        if maker is None or maker.eqn.primitive.name not in _SAME:
            return atom
        return self.source(*maker.eqn.invars)


def _find(site: Site, packing: Panels, body: _Body) -> Product | None:
    """Returns a product if its rows are the plain quantization of floats.

    Args:
        site: equation of the product.
        packing: packing of the weights.
        body: equations of its jaxpr.
    """
    rounding = body.makers.get(body.source(site.eqn.invars[1 - packing.argument]))
    grid = None if rounding is None else _grid_of(rounding.eqn, packing)
    if rounding is None or grid is None:
        return None
    end, found = None, rounding.eqn.outvars[1]
    if grid.own_scales is None:
        rows = body.source(rounding.eqn.invars[0])
        of_rows = poison.OfEnds(_last_axes(rows.aval, packing))
        ends = [
            one
            for one in body.readers[rows]
            if rounding.location < one.location < site.location
            and target.function_of(one.eqn) == of_rows
        ]
        end = ends[0] if len(ends) == 1 else None
        found = None if end is None else end.eqn.outvars[0]
    barriers = tuple(
        one
        for one in body.readers[found]
        if poison.is_factor_barrier(target.function_of(one.eqn))
    )
    return Product(site, packing, rounding, grid, end, barriers)


def _last_axes(rows: Any, packing: Panels) -> tuple[int, ...]:
    """The axes of a row, as many as the weights contract."""
    ndim = len(rows.shape)
    return tuple(range(ndim - len(packing.contracting), ndim))


def _grid_of(eqn: Any, packing: Panels) -> Grid | None:
    """Returns the grid of the plain quantization of rows; None for other equations.

    Equations are plain if they are those of the quantizer, on a grid whose arithmetic
    the kernel has: integers, zero among them, whose scales have normal reciprocals.
    """
    if eqn.primitive is not primitives.jit_p:
        return None
    body = _body(eqn)
    grids = [
        value
        for inner in body.jaxpr.eqns
        for value in getattr(target.function_of(inner), "static", ())
        if type(value) is numerics.IntSymmetric
    ]
    if len(grids) != 1:
        return None
    (grid,), text, x = grids, str(body), shape_of(body.in_avals[0])
    if not grid.has_zero or grid.bound < quantizer.SAFE_BOUND:
        return None
    axes = _last_axes(x, packing)
    # The kernel takes float32, in which float64 may be infinite.
    if math.prod(x.shape[: axes[0]]) > _ROWS or x.dtype == np.float64:
        return None
    if text == _with_a_given_scale(grid, x):
        return Grid(grid.largest_stored, own_scales=None)
    for path in _PATHS:
        if text == _with_own_scales(grid, x, axes, path):
            factor = calibration.scale_factor(grid.bound, grid.unit)
            of_zeros = zero_channels.scale(config.Tensor(numerics=grid), path)
            return Grid(grid.largest_stored, OwnScales(factor, of_zeros))
    return None


@functools.lru_cache(maxsize=256)
def _with_own_scales(
    grid: numerics.IntSymmetric,
    rows: jax.ShapeDtypeStruct,
    axes: tuple[int, ...],
    path: str,
) -> str:
    """The equations of the plain quantization of rows, each with a scale of its own.

    Args:
        grid: grid of the rows.
        rows: type of the rows.
        axes: axes of a row.
        path: path of a config.
    """
    of_x = OperandAxes.of_contracting(len(rows.shape), axes)
    tensor = config.Tensor(numerics=grid)
    return _text(lambda x: quantizer.quantize_array(x, tensor, of_x, path), rows)


@functools.lru_cache(maxsize=256)
def _with_a_given_scale(grid: numerics.IntSymmetric, rows: jax.ShapeDtypeStruct) -> str:
    """The equations of the rounding of rows that have one scale, the last input."""
    tensor = config.Tensor(numerics=grid)
    scale = jax.ShapeDtypeStruct((1,) * len(rows.shape), np.float32)

    def rounded(x: jax.Array, scale: jax.Array) -> Any:
        known = quantizer.Calibrated(scale, scale, None)
        reciprocal = barriers.reciprocal_of_given(_PATHS[0], tensor)
        return quantizer.round_to_grid(x, known, tensor, None, reciprocal)

    return _text(rounded, rows, scale)


def _text(function: Callable[..., Any], *args: jax.ShapeDtypeStruct) -> str:
    (eqn,) = jax.make_jaxpr(function)(*args).jaxpr.eqns
    return str(_body(eqn))


def _body(eqn: Any) -> core.ClosedJaxpr:
    (body,) = equations.bodies(eqn)
    return body
