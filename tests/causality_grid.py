"""Which models depend on what they do not depend on in float: a table by presets.

``python -m tests.causality_grid [preset ...]`` prints, for each of `causal_models`, how
much results change, at most and relative to the largest, with other values at later
positions, in other examples, and at positions that do not count.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite import config
from aqtlite.flax import calibrate, quantize_model
from aqtlite.quantization.states.state_collections import STATISTICS
from aqtlite.testing import other_values
from tests.causal_models import MODELS, injected
from tests.common import normal, quick_jit
from tests.flax.support import init

BATCH, TIME, FEATURES, MEMORY = 2, 8, 16, 6
PRESETS = {name: one for name, one in config.presets().items() if name != "unquantized"}
LEARNED = ("lsq", "lsq_weight_only")  # Their scales start from the operands.
INJECTED = ("injected decoder", "injected convolution")
NAMES = (*MODELS, *INJECTED)

# The first positions of the first example do not count, as where prompts are padded.
_COUNTS = np.arange(TIME) >= np.array([[3], [0]])
_IN_MEMORY = np.arange(MEMORY) >= np.array([[2], [0]])
# Positions of different loudness: without, grids with exponents hide a shared scale.
_LOUDNESS = np.array([1, 1e-3, 0.1, 1e-4, 1, 0.01, 0.1, 1e-3], np.float32)
_LAST = np.arange(TIME) >= 5  # Not where a chunk begins.


class Case(NamedTuple):
    """A model with its variables and arguments."""

    apply: Callable[..., Any]
    args: tuple[Any, ...]
    """Activations and their mask; in cross attention, of a memory, too."""

    @property
    def padded(self) -> tuple[Any, ...]:
        """The arguments with masks by which some positions do not count."""
        masks = (_COUNTS, _IN_MEMORY)
        pairs = zip(self.args[::2], masks, strict=False)
        return tuple(x for pair in pairs for x in pair)

    @property
    def repadded(self) -> tuple[Any, ...]:
        """`padded` with other values at the positions that do not count."""
        arrays, masks = self.padded[::2], self.padded[1::2]
        return tuple(
            one
            for x, counts in zip(arrays, masks, strict=True)
            for one in (
                jnp.where(counts[..., None], x, -20 * jnp.roll(x, 1, 0)),
                counts,
            )
        )


def case(name: str, preset: str | None) -> Case:
    """Returns a model, quantized by a preset; in float without one."""
    model, cfg = MODELS.get(name), None if preset is None else PRESETS[preset].make()
    if model is None:
        model = injected(cfg)[name]
    elif cfg is not None:
        model = quantize_model(model, cfg)
    x = normal((BATCH, TIME, FEATURES)) * _LOUDNESS[:, None]
    args = [x, np.ones((BATCH, TIME), bool)]
    if name == "cross attention":
        args += [normal((BATCH, MEMORY, FEATURES), 1), np.ones((BATCH, MEMORY), bool)]
    if preset in LEARNED:
        variables = quick_jit(model.init)(jax.random.key(0), *args)
    else:
        variables = init(model, *args)
    if STATISTICS in variables:
        variables = calibrate(model, variables, [tuple(args)])
    return Case(functools.partial(model.apply, variables), tuple(args))


def padding_leak(one: Case, run: Callable[..., Any]) -> float:
    """Returns how much results change with the values of what does not count.

    Args:
        one: the case.
        run: its compiled function.
    """
    before, after = (np.asarray(run(*x)) for x in (one.padded, one.repadded))
    return _relative(before, after, _COUNTS)


def leaks(name: str, preset: str | None) -> tuple[float, float, float]:
    """Returns the relative changes of results by later positions, other examples, and
    positions that do not count."""
    one = case(name, preset)
    run = quick_jit(one.apply)
    x, *others = one.args
    before = np.asarray(run(x, *others))
    later = np.asarray(run(other_values.loud(x, 1, _LAST), *others))
    is_second = np.array([False, True])
    changed = [
        other_values.loud(y, 0, is_second) if other_values.has_others(y) else y
        for y in one.args
    ]
    examples = np.asarray(run(*changed))
    return (
        _relative(before, later, np.broadcast_to(~_LAST, before.shape[:2])),
        _relative(
            before, examples, np.broadcast_to(~is_second[:, None], before.shape[:2])
        ),
        padding_leak(one, run),
    )


def _relative(before: np.ndarray, after: np.ndarray, where: np.ndarray) -> float:
    before, after = before[where], after[where]
    return float(np.abs(before - after).max() / np.abs(before).max())


def rows(presets: list[str]) -> Iterator[str]:
    """Yields the lines of the table."""
    yield f"{'model':30}{'preset':18}{'later':>10}{'examples':>10}{'padding':>10}"
    cases = found = 0
    for name in NAMES:
        for preset in (None, *presets):
            if preset is None and name in INJECTED:
                continue
            try:
                changes = leaks(name, preset)
            except (TypeError, ValueError) as error:
                yield f"{name:30}{preset!s:18} {type(error).__name__}: {error}"[:120]
                continue
            shown = "".join(f"{x:10.2g}" if x else f"{'-':>10}" for x in changes)
            yield f"{name:30}{preset or 'float':18}{shown}"
            cases += preset is not None
            found += any(changes)
    yield f"{found} of {cases} quantized cases leak"


if __name__ == "__main__":
    for row in rows(sys.argv[1:] or list(PRESETS)):
        print(row, flush=True)
