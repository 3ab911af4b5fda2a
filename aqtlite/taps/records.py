"""Records of tapped contractions: arrays, numbers for loggers, tables, JSON."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.text

from aqtlite import config, errors
from aqtlite.contraction import tapped
from aqtlite.output import rich_tables

_STATIC: dict[str, Any] = {"static": True}

LOGGED = ("snr", "clipped", "flushed", "largest", "reach")
"""Fields of an operand that `Taps.scalars` has."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TappedOperand:
    """What the rounding of one operand does in one call.

    Its arrays have an axis for each `jax.lax.scan` and `jax.vmap` around the
    contraction, such as one over scanned layers; otherwise they are scalars. NaN, and
    -1 for indices: a branch that was not taken.
    """

    path: str = dataclasses.field(metadata=_STATIC)
    """Path of the contraction, as rules match it; empty outside of name scopes."""

    operand: str = dataclasses.field(metadata=_STATIC)
    """Operand of the config, such as ``"fwd.lhs"``."""

    shape: tuple[int, ...] = dataclasses.field(metadata=_STATIC)
    shapes: tuple[tuple[int, ...], tuple[int, ...]] = dataclasses.field(
        metadata=_STATIC
    )
    """Shapes of both operands of the contraction."""

    cfg: config.Tensor = dataclasses.field(metadata=_STATIC)
    """Its config; the blocks of ``local_aqt`` are in it."""

    contracting: tuple[int, ...] = dataclasses.field(metadata=_STATIC)
    """Its contracting axes."""

    channels: int = dataclasses.field(metadata=_STATIC)
    """Number of contracted elements that blocks could split, of one group."""

    can_smooth: bool = dataclasses.field(metadata=_STATIC)
    """Whether its contraction could be smoothed, and is not."""

    is_of_activations: bool = dataclasses.field(metadata=_STATIC)
    """Whether both operands are quantized as the lhs of the config that is given."""

    can_rotate: bool = dataclasses.field(metadata=_STATIC)
    """Whether its contraction could be rotated to advantage, and is not."""

    by_rule: bool = dataclasses.field(metadata=_STATIC)
    """Whether a rule quantizes it."""

    has_batch: bool = dataclasses.field(metadata=_STATIC)
    """Whether its contraction has batch axes, as those of two activations have."""

    snr: Any
    """Signal-to-noise ratio of its rounding in dB, float32."""

    clipped: Any
    """Share of its elements beyond the largest value that their scale reaches."""

    flushed: Any
    """Share of its elements that are not zero, and are rounded to zero."""

    largest: Any
    """Largest magnitude that is finite, float32."""

    reach: Any
    """Largest magnitude by the largest that its scale reaches, of the fullest channel:
    1 for a dynamic range, more where a static or delayed range clips."""

    not_finite: Any
    """Number of its elements that are NaN or infinite."""

    lost: Any
    """Number of its elements that are finite, and are not after rounding."""

    channel: Any
    """Index along `axis` of the channel with the largest magnitude, among those that
    share a scale; or of the first that is not finite. int32."""

    axis: Any
    """Axis of the operand, int32; -1 if its scale is shared by few elements."""

    ratio: Any
    """That channel's largest magnitude by the geometric mean of that of the others;
    infinite if it is not finite."""

    noise: Any
    """Digest of its noise, int32: operands of one shape and digest are rounded with the
    same noise. Zero without noise."""

    @property
    def grid(self) -> str:
        """Name of its grid, such as ``int8``."""
        return self.cfg.grid.name

    @property
    def bits(self) -> int:
        """Width of its grid."""
        return tapped.bits_of(self.cfg)

    @property
    def is_float(self) -> bool:
        """Whether its grid is of floats, which round small values as well as large."""
        return self.cfg.grid.arithmetic == "float"

    @property
    def is_forward(self) -> bool:
        """Whether it is an operand of the forward contraction."""
        return self.operand.startswith("fwd")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TappedResult:
    """The error of a contraction's result."""

    path: str = dataclasses.field(metadata=_STATIC)
    """Path of the contraction, as rules match it; empty outside of name scopes."""

    contraction: str = dataclasses.field(metadata=_STATIC)
    """ "fwd"; "dlhs" or "drhs" for the gradient of an operand."""

    snr: Any
    """Signal-to-noise ratio in dB against the contraction of floats, with the same
    operands; one that is kept quantized for a gradient counts as exact."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ResultError:
    """The error of an array that the tapped function returns."""

    path: str = dataclasses.field(metadata=_STATIC)
    """Path of the array in the result."""

    snr: Any
    """Signal-to-noise ratio in dB against the function with contractions in float."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Taps:
    """What the quantized contractions of a call do; prints as a table."""

    operands: tuple[TappedOperand, ...]
    """In program order; those of gradients come last."""

    results: tuple[TappedResult, ...] = ()
    """Errors of contractions, of `tap_against_float` only."""

    errors: tuple[ResultError, ...] = ()
    """Errors of what the function returns, of `tap_against_float` only."""

    def with_errors(self, errors: tuple[ResultError, ...]) -> "Taps":
        """Returns these taps with errors of results."""
        return dataclasses.replace(self, errors=errors)

    def scalars(self) -> dict[str, jax.Array]:
        """Returns numbers by name, as loggers take them.

        Names are ``path/operand/field``, with the index of a scanned layer in between.
        Works under `jax.jit`, such as for `jax.debug.callback`.
        """
        found = {}
        for one in self.operands:
            for field in LOGGED:
                values = jnp.asarray(getattr(one, field))
                for index in np.ndindex(values.shape):
                    name = "/".join(
                        [errors.label(one.path), one.operand, *map(str, index), field]
                    )
                    found[name] = values[index]
        results = [(errors.label(x.path), x.contraction, x.snr) for x in self.results]
        results += [(x.path, "result", x.snr) for x in self.errors]
        for path, of, snr in results:
            for index in np.ndindex(jnp.shape(snr)):
                name = "/".join([path, of, *map(str, index), "snr"])
                found[name] = jnp.asarray(snr)[index]
        return found

    def to_json(self, *, indent: int | None = None) -> str:
        """Writes the taps as JSON; None for what is not finite."""
        plain = jax.tree.map(lambda x: np.asarray(x).tolist(), self)
        fields = dataclasses.asdict(plain)
        for one, found in zip(self.operands, fields["operands"], strict=True):
            del found["cfg"]
            found["grid"] = one.grid
        return json.dumps(rich_tables.finite(fields), indent=indent)

    def _tables(self) -> Iterator[tuple[int, list[Sequence[str]]]]:
        heads = ("path", "operand", "grid", "dB", "clipped", "zeroed", "largest")
        rows: list[Sequence[str]] = [(*heads, "reach", "outlier")]
        rows += [_row(one) for one in self.operands]
        yield 3, rows
        if self.results:
            results = (
                (errors.label(x.path), x.contraction, _worst(x.snr))
                for x in self.results
            )
            yield 2, [("path", "result", "dB"), *results]
        if self.errors:
            yield (
                1,
                [("returned", "dB"), *((x.path, _worst(x.snr)) for x in self.errors)],
            )

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> rich.console.RenderResult:
        for num_texts, rows in self._tables():
            yield rich_tables.layout(rows, num_texts)

    def _repr_html_(self) -> str:
        return rich_tables.as_html("", *(rows for _, rows in self._tables()))

    def __repr__(self) -> str:
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(self)):
            return f"Taps of {len(self.operands)} operands, traced"
        return rich_tables.as_text(self)


def worst(one: TappedOperand) -> TappedOperand:
    """Returns the step or row of an operand with the worst rounding, as scalars."""
    arrays = jax.tree.map(np.asarray, one)
    if not arrays.snr.ndim:
        return arrays
    order = np.where(np.isnan(arrays.snr), np.inf, arrays.snr)
    broken = np.nan_to_num(arrays.not_finite + arrays.lost)
    index = np.argmax(broken) if broken.max(initial=0) > 0 else np.argmin(order)
    at = np.unravel_index(index, arrays.snr.shape)
    return jax.tree.map(lambda x: x[at], arrays)


def _row(one: TappedOperand) -> Sequence[str]:
    at = worst(one)
    outlier = ""
    if at.axis >= 0 and at.ratio > 1:
        outlier = f"axis {at.axis} [{at.channel}] {at.ratio:.3g} x"
    return (
        errors.label(one.path),
        one.operand,
        one.grid,
        f"{at.snr:.1f}",
        _percent(at.clipped),
        _percent(at.flushed),
        f"{at.largest:.3g}",
        f"{at.reach:.2f}",
        outlier,
    )


def _percent(share: Any) -> str:
    return f"{100 * share:.1f} %" if share > 0 else "0"


def _worst(snr: Any) -> str:
    return f"{lowest(snr):.1f}"


def lowest(snr: Any) -> float:
    """Returns the lowest value that is not NaN; NaN if all are."""
    return float(np.fmin.reduce(np.ravel(snr)))
