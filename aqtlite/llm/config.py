"""What a decoder consists of, as one frozen record."""

import dataclasses
import math
from typing import Any, Literal

import numpy as np

Norm = Literal["rms", "rms_plus_one", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864).

    >>> Rope(theta=100.0).frequencies(4).tolist()
    [1.0, 0.10000000149011612]
    """

    theta: float = 10_000.0

    factors: tuple[float, ...] | None = None
    """What each frequency is divided by, as linear scaling and that of Llama 3 ask."""

    interleaved: bool = False
    """Rotate pairs of adjacent channels, as GGUF files of Llama are laid out; otherwise
    channel i with channel i + size/2, as Hugging Face does."""

    def frequencies(self, size: int) -> np.ndarray:
        """Angles per position of the pairs of a head of `size` channels, float32.

        Raises:
            ValueError: if there is another number of factors than of pairs.
        """
        exponents = np.arange(0, size, 2).astype(np.float32) / np.float32(size)
        with np.errstate(all="ignore"):
            found = np.float32(1) / np.power(np.float32(self.theta), exponents)
        if self.factors is None:
            return found
        if len(self.factors) != len(found):
            raise ValueError(
                f"Rope has {len(self.factors)} factors, and a head of {size} channels "
                f"{len(found)} frequencies"
            )
        with np.errstate(all="ignore"):
            return found / np.asarray(self.factors, np.float32)


def linear_factors(factor: float, size: int) -> tuple[float, ...]:
    """Factors that stretch all positions alike."""
    return (factor,) * (size // 2)


def llama3_factors(
    theta: float, size: int, *, factor: float, low: float, high: float, length: float
) -> tuple[float, ...]:
    """Factors of Llama 3.1: long wavelengths are stretched, short ones are kept.

    Args:
        theta: base of the frequencies.
        size: channels of a head.
        factor: what frequencies of long wavelengths are divided by.
        low: wavelengths over ``length / low`` are long.
        high: wavelengths under ``length / high`` are short; in between, the frequencies
            are interpolated.
        length: positions that the model was first trained on.
    """
    wavelengths = 2 * math.pi / Rope(theta=theta).frequencies(size).astype(np.float64)
    smooth = np.clip((length / wavelengths - low) / (high - low), 0, 1)
    return tuple((1 / ((1 - smooth) / factor + smooth)).tolist())


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder of the Llama, Qwen, Mistral, Gemma or GPT-2 family.

    >>> tiny = DecoderConfig(
    ...     vocabulary=32, width=16, heads=4, kv_heads=2, head_size=4, hidden=24,
    ...     ropes=(Rope(),) * 2, windows=(None,) * 2,
    ... )
    >>> tiny.layers
    2

    Raises:
        ValueError: if a size is below 1, the heads are no multiple of the heads of
            keys, there is another number of `windows` than of `ropes`, or a rotary
            embedding has no finite frequency for each pair of channels.
    """

    vocabulary: int
    width: int
    heads: int
    """Heads of queries."""
    kv_heads: int
    """Heads of keys and values; each serves a group of consecutive query heads."""
    head_size: int
    hidden: int
    """Width of the MLPs."""

    ropes: tuple[Rope | None, ...]
    """Rotary embedding of each layer; None for none."""
    windows: tuple[int | None, ...]
    """Number of last positions that each layer attends to; None for all."""

    positions: int | None = None
    """Rows of a table of learned positions (GPT-2); None for no table."""
    length: int | None = None
    """Positions that the model was trained on; None if unknown."""

    norm: Norm = "rms"
    """Normalization. "rms_plus_one" scales by one plus the weight (Gemma)."""
    eps: float = 1e-6
    qk_norm: bool = False
    """Normalize the heads of queries and keys (Qwen 3, Gemma 3)."""
    post_norms: bool = False
    """Normalize also what attention and MLPs add (Gemma 3)."""

    activation: Activation = "silu"
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False

    embedding_scale: float = 1.0
    score_scale: float | None = None
    """Factor of the scores of attention; None for ``1 / sqrt(head_size)``."""
    tied: bool = False
    """Compute logits with the table of embeddings."""

    def __post_init__(self) -> None:
        names = ("vocabulary", "width", "heads", "kv_heads", "head_size", "hidden")
        for name in names:
            value: Any = getattr(self, name)
            if value < 1:
                raise ValueError(f"DecoderConfig.{name} must be at least 1: {value}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"DecoderConfig.heads={self.heads} is no multiple of "
                f"kv_heads={self.kv_heads}"
            )
        if not self.ropes or len(self.ropes) != len(self.windows):
            raise ValueError(
                "DecoderConfig.ropes and .windows have an entry for each layer, got "
                f"{len(self.ropes)} and {len(self.windows)}"
            )
        for rope in set(self.ropes):
            if rope and not np.isfinite(rope.frequencies(self.head_size)).all():
                raise ValueError(
                    f"a rotary embedding with theta={rope.theta} has frequencies that "
                    "are NaN or infinite: its factors have to be positive numbers"
                )

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.ropes)
