"""The contractions of Flax's attention, known by their equations."""

import contextlib
import re

from aqtlite import config
from aqtlite.contraction import tapped

# Letters may differ: queries, keys, heads and features are q, k, h and d. Both operands
# have batch axes, which weights have not.
_BATCH = r"(\.\.\.|[a-zA-Z]+)"
_SCORES = re.compile(_BATCH + r"(.)(.)(.),\1(.)\3\4->\1\3\2\5")
_VALUES = re.compile(_BATCH + r"(.)(.)(.),\1\4\2(.)->\1\3\2\5")


def config_of(cfg: config.DotGeneral | None, equation: str) -> config.DotGeneral | None:
    """Returns the config of an einsum, which in Flax's attention has two activations.

    `nn.dot_product_attention` and `nnx.dot_product_attention` call
    ``einsum("...qhd,...khd->...hqk", queries, keys)`` and
    ``einsum("...hqk,...khd->...qhd", probabilities, values)``.

    Args:
        cfg: config of every contraction of the attention.
        equation: equation that is called.
    """
    if cfg is None:
        return None
    equation = equation.replace(" ", "")
    if _SCORES.fullmatch(equation):
        return config.for_activations(cfg)
    if _VALUES.fullmatch(equation):
        return config.for_values(config.for_activations(cfg))
    return cfg


def noted(
    cfg: config.DotGeneral | None, equation: str
) -> contextlib.AbstractContextManager[None]:
    """Says for taps if `config_of` quantizes both operands as the config's lhs.

    Args:
        cfg: config of every contraction of the attention.
        equation: equation that is called.
    """
    equation = equation.replace(" ", "")
    is_known = _SCORES.fullmatch(equation) or _VALUES.fullmatch(equation)
    if cfg is None or not cfg.fwd.lhs.is_quantized or not is_known:
        return contextlib.nullcontext()
    return tapped.planned_as(tapped.Planned(path=None, is_of_activations=True))
