"""What the compiled program of a function does: `aqtlite.report`."""

import collections
import dataclasses
import json
import os
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import rich.console

from aqtlite import errors
from aqtlite.output import rich_tables
from aqtlite.program import contracted_in
from aqtlite.program.modules import flax_models
from aqtlite.program.naming import Parameters
from aqtlite.reporting import (
    collectives,
    comparison,
    contraction,
    copies,
    hlo,
    joined,
    measured,
    page,
    products,
    program,
    roofline,
    surroundings,
    tables,
    traced,
)
from aqtlite.reporting.collectives import Collective
from aqtlite.reporting.comparison import Comparison
from aqtlite.reporting.contraction import NOT_FOUND, ReportedContraction
from aqtlite.reporting.copies import Copy
from aqtlite.reporting.memory import Memory, saved_bytes
from aqtlite.reporting.products import Product
from aqtlite.reporting.roofline import Estimate, Rates
from aqtlite.reporting.surroundings import Around


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """The contractions of a function, as asked and as compiled; prints as a table."""

    name: str
    """Name of the function or model."""

    platform: str
    """Platform that the program is for: "cpu", "cuda", "rocm" or "tpu"."""

    device: str
    """Kind of the device that it is compiled for; empty if it is only lowered, for a
    platform that is not here."""

    contractions: tuple[ReportedContraction, ...]
    """In the order of the traced program, forward and backward."""

    others: tuple[Product, ...]
    """Products of the compiled program that belong to no contraction."""

    copies: tuple[Copy, ...]
    """Float, transposed and further quantized copies of operands in memory."""

    collectives: tuple[Collective, ...]
    """Exchanges between devices."""

    memory: Memory | None
    """Memory of the compiled program; None if it is only lowered."""

    saved_bytes: int
    """Bytes of values that the traced program saves for backward passes, without its
    arguments; 0 without a backward pass."""

    @property
    def macs(self) -> int:
        """Multiply-accumulates of a call, as far as they are known."""
        return sum(one.macs or 0 for one in self.contractions)

    @property
    def shares(self) -> dict[str, float]:
        """Share of the multiply-accumulates in each dtype, the largest first.

        A contraction that the compiled program does not have counts as "not found".
        """
        counts: collections.Counter[str] = collections.Counter()
        for one in self.contractions:
            of_dtypes = one.in_dtypes or {NOT_FOUND: 1.0}
            for dtype, part in of_dtypes.items():
                counts[dtype] += part * (one.macs or 0)  # type: ignore[assignment]
        total = self.macs
        return {dtype: n / total for dtype, n in counts.most_common() if total}

    def share(self, dtype: jax.typing.DTypeLike) -> float:
        """Returns the share of the multiply-accumulates that run in a dtype.

        Args:
            dtype: the dtype of both operands, such as "int8", or of two that differ,
                such as "int8 x float32"; or "not found".

        Raises:
            TypeError: if there is no such dtype.
        """
        name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
        if name != NOT_FOUND:
            for one in name.split(" x "):
                jnp.dtype(one)  # An unknown one has no share, as one that nothing has.
        return self.shares.get(name, 0.0)

    def share_of(self, one: ReportedContraction) -> float:
        """Returns the share of a contraction in the multiply-accumulates."""
        return (one.macs or 0) / self.macs if self.macs else 0.0

    def shared_along(self, axis: int) -> tuple[ReportedContraction, ...]:
        """Returns the forward contractions with scales shared along an axis of inputs.

        A scale that the examples of a batch share makes the result of one depend on the
        others; one that positions share lets earlier ones see later ones. Without such
        scales, quantization adds no dependency that the float program has not;
        `aqtlite.testing.assert_independent` and `assert_causal` run the program.

        Args:
            axis: axis of arguments that are no parameters: usually 0 for examples, 1
                for positions. `report` takes all arguments of a function for such,
                weights too, without its `params`.

        Raises:
            ValueError: if the axis is negative, since arguments differ in their number.
        """
        if not isinstance(axis, int) or axis < 0:
            raise ValueError(f"axis counts from the first, 0, on; got {axis!r}")
        return tuple(
            one
            for one in self.contractions
            if one.role == "forward"
            and any(axis == of for x in one.scales for _, of in x.shared)
        )

    def compare(self, other: "Report") -> Comparison:
        """Compares the contractions of another program with these, by path.

        Raises:
            TypeError: if `other` is no report.
        """
        if not isinstance(other, Report):
            raise TypeError(
                "compare takes another report, as aqtlite.report returns it, got "
                f"{errors.brief(other)}"
            )
        return comparison.compare(self, other)

    def estimate(self, device: str | Rates) -> tuple[Estimate, ...]:
        """Estimates the time of each contraction on a device, also in bfloat16.

        A roofline, no measurement (`aqtlite.measure_serving` measures): the time of the
        products or of the bytes of operands and result, whichever is longer, and that
        of a pass over each operand that is quantized in the call.

        Args:
            device: "A100", "H100", "H200", "TPU v5e", "TPU v5p", "TPU v6e", or the
                rates of another device.

        Raises:
            ValueError: if the device is unknown.
        """
        return roofline.estimate(self, device)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data."""
        found = dataclasses.asdict(self)
        for one, row in zip(self.contractions, found["contractions"], strict=True):
            row["share"] = self.share_of(one)
        found["macs"], found["shares"] = self.macs, self.shares
        if self.memory is not None:
            found["memory"]["peak"] = self.memory.peak
        return found

    def to_json(self, *, indent: int | None = None) -> str:
        """Writes the report as JSON: an object with the fields of the report."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_html(
        self,
        path: str | os.PathLike[str],
        *,
        taps: Any = None,
        operands: Mapping[str, tuple[Any, Any]] = types.MappingProxyType({}),
    ) -> None:
        """Writes the report as a page with plots, which needs no other file.

        Args:
            path: path of the file.
            taps: those of `aqtlite.tap` or `aqtlite.tap_against_float`, whose errors
                over layers the page draws.
            operands: operands by name, each in float and as the `QTensor` of
                `aqtlite.quantize`, whose histograms the page draws with their grid.

        Raises:
            OSError: if the file cannot be written.
            TypeError: if an operand is not given with its `QTensor`, or `taps` are
                those of several steps.
            ValueError: if the path is an address, a folder or a symbolic link, the
                shapes of both differ, or no element is finite.
        """
        page.write(self, path, taps, operands)

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> rich.console.RenderResult:
        yield from tables.of_report(self)

    def _repr_html_(self) -> str:
        return tables.as_html(self)

    def __repr__(self) -> str:
        return rich_tables.as_text(self)


def report(
    fn: Any,
    *args: Any,
    params: Parameters = None,
    platform: str | None = None,
    measured_runs: int = 0,
    **kwargs: Any,
) -> Report:
    """Returns what the compiled program of a function contracts, and in which dtypes.

    Traces and compiles the function, and reads both programs: each
    contraction that the function asks for, forward and backward, with the products
    that the compiler made of it. Works on any function of JAX, quantized by this
    library, by others or not at all.

    >>> import jax.numpy as jnp
    >>> from aqtlite import config, make_dot_general
    >>> dot_general = make_dot_general(config.fully_quantized())
    >>> def layer(w, x):
    ...     return jnp.einsum("bk,kn->bn", x, w, _dot_general=dot_general) @ w.T
    >>> found = report(layer, jnp.ones((64, 32)), jnp.ones((8, 64)), params=0)
    >>> [(one.asked, one.runs_in) for one in found.contractions]
    [('int8', 'int8'), ('float32', 'float32')]
    >>> found.share("int8")
    0.5

    Args:
        fn: a function, jitted or not; a model of Linen, or another one whose `apply`
            takes the variables first; or a model of NNX. For the backward pass, give
            the function that takes the gradient.
        *args: its arguments, or `jax.ShapeDtypeStruct`s for arrays.
        params: which arguments are parameters, as in `aqtlite.plan`, for the paths of
            functions without name scopes. None: for a model, its variables.
        platform: "cpu", "cuda", "rocm" or "tpu" reads the program as JAX lowers it for
            one device of this platform, on any host. It says what the compiler there
            is given. None compiles for the devices of the arguments: those that are
            here, or TPUs of `jax.experimental.topologies` that libtpu compiles for, if
            the types of the arguments have a sharding on them.
        measured_runs: how often to run the function under `jax.profiler`, for the
            seconds of each contraction. 0 runs nothing, and needs no values.
        **kwargs: as `args`. What is no array is a constant of the program. Of NNX
            objects, what the function changes in them counts as its result.

    Raises:
        TypeError: if `fn` is no function or model.
        ValueError: if the platform is unknown, `params` names no argument, or
            `measured_runs` is no number of runs, or given without arrays or for another
            platform.
    """
    if not isinstance(measured_runs, int) or measured_runs < 0:
        raise ValueError(
            f"measured_runs must be a number of runs, got {measured_runs!r}"
        )
    if measured_runs:
        state = fn if flax_models.is_nnx(fn) else None
        _check_can_run(platform, (state, args, kwargs))
    if platform is not None:
        contracted_in.check_platform(platform)
    traced_program = program.trace(fn, args, kwargs, params)
    stages = traced_program.traced
    if platform is None:
        compiled = stages.lower().compile()
        text, memory = compiled.as_text(), Memory.of(compiled)
        device = _device_of(compiled)
        name, device_kind = device.platform, device.device_kind
    else:
        lowered = stages.lower(lowering_platforms=(platform,))
        text, memory = lowered.as_text(dialect="hlo", debug_info=True), None
        name, device_kind = platform, ""
    asked = traced.find(stages.jaxpr, traced_program.parameters, traced_program.names)
    module = hlo.parse(text)
    products_of, others = joined.join(asked, products.find(module))
    seconds: dict[str, float] = {}
    if measured_runs:
        seconds = measured.seconds(traced_program.call, module.name, measured_runs)
    around = surroundings.find(module, joined.finder(asked))
    layers = [one.in_layer() for one in asked]
    find = joined.finder(layers)

    def path_of(op_name: str) -> str:
        return next((layers[i].path for i in find(op_name) if layers[i].scope), "")

    return Report(
        name=traced_program.name,
        platform=name,
        device=device_kind,
        contractions=tuple(
            contraction.of(one, found, around.get(i, Around()), seconds)
            for i, (one, found) in enumerate(zip(asked, products_of, strict=True))
        ),
        others=tuple(others),
        copies=tuple(copies.find(module, path_of)) if memory else (),
        collectives=tuple(collectives.find(module, path_of)),
        memory=memory,
        saved_bytes=saved_bytes(stages.jaxpr),
    )


def _device_of(compiled: jax.stages.Compiled) -> jax.Device:
    """Returns one of the devices that a program is compiled for.

    They are those of its arguments, which need not be here.
    """
    shardings = compiled.input_shardings, compiled.output_shardings
    for sharding in jax.tree.leaves(shardings):
        return min(sharding.device_set, key=lambda device: device.id)
    return jax.devices()[0]


def _check_can_run(platform: str | None, given: Any) -> None:
    shapes = [x for x in jax.tree.leaves(given) if isinstance(x, jax.ShapeDtypeStruct)]
    if platform is not None or shapes:
        what = f"platform={platform!r}" if platform is not None else str(shapes[0])
        raise ValueError(
            "measured_runs runs the function on the devices that are here, and needs "
            f"arrays for all arguments and variables; got {what}"
        )
