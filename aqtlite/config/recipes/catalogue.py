"""The presets, by name."""

import dataclasses
from collections.abc import Callable
from types import MappingProxyType

from aqtlite.config.dot_general import DotGeneral
from aqtlite.config.recipes import block_formats, post_training, training
from aqtlite.output.tables import Tables, as_html


@dataclasses.dataclass(frozen=True)
class Preset:
    """A function that makes a config, with a description for users."""

    make: Callable[..., DotGeneral]
    """Function in `aqtlite.config` that makes the config."""

    purpose: str
    """One-line description of the format."""

    audience: str
    """Intended users."""

    needs: str
    """Requirements other than the config, such as statistics; empty for none."""


class Presets(dict[str, Preset]):
    """Presets by name, shown as a table."""

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [(k, one.purpose, one.needs) for k, one in self.items()]
        return [("preset", "purpose", "needs"), *rows]

    def __repr__(self) -> str:
        return Tables([self._rows()])

    def _repr_html_(self) -> str:
        return as_html(self._rows())


_STATISTICS = "statistics of activations"
_SCALES = "scales that training learns"


def presets() -> Presets:
    """Presets by name, each with a function and a purpose.

    >>> cfg = presets()["weight_only"].make(bits=4)
    >>> cfg == training.weight_only(bits=4)
    True
    >>> presets()["lsq"].needs
    'scales that training learns'
    """
    return Presets(_PRESETS)


_PRESETS = MappingProxyType(
    {
        "unquantized": Preset(
            training.unquantized,
            "floats",
            "a baseline with the same code",
            "",
        ),
        "fully_quantized": Preset(
            training.fully_quantized,
            "int8 in the forward and both backward contractions",
            "training in int8, and serving what was trained",
            "",
        ),
        "qat": Preset(
            training.qat,
            "int8 in the forward contraction, gradients in float",
            "training for serving in few bits, with float gradients",
            "",
        ),
        "lsq": Preset(
            training.lsq,
            "int4 with learned steps, int8 gradients",
            "training weights and activations to 4 bits and fewer",
            _SCALES,
        ),
        "lsq_weight_only": Preset(
            training.lsq_weight_only,
            "int4 weights with learned steps, floats for the rest",
            "training weights to 4 bits and fewer where activations stay in float",
            _SCALES,
        ),
        "weight_only": Preset(
            training.weight_only,
            "int8 or fewer bits for weights, floats for the rest",
            "serving with less memory, also without training",
            "",
        ),
        "gptq": Preset(
            post_training.gptq,
            "int4 or fewer bits for weights rounded by GPTQ, floats for the rest",
            "serving a trained model with the least memory, without training",
            _STATISTICS,
        ),
        "w4a8": Preset(
            training.w4a8,
            "int4 weights, int8 activations and gradients",
            "serving with half the memory of int8, in integer arithmetic",
            "",
        ),
        "static_int8": Preset(
            post_training.static_int8,
            "int8 with one fixed range for activations",
            "serving without a reduction over activations",
            _STATISTICS,
        ),
        "smoothquant": Preset(
            post_training.smoothquant,
            "int8 with outliers of activations moved into the weights",
            "models whose activations have channels with outliers",
            _STATISTICS,
        ),
        "fp8": Preset(
            training.fp8,
            "8-bit floats: e4m3 forward, e5m2 for gradients",
            "training on GPUs with fp8 units",
            "",
        ),
        "block_fp8": Preset(
            block_formats.block_fp8,
            "e4m3 with a scale for each 128 elements",
            "training large models in fp8 (DeepSeek-V3)",
            "",
        ),
        "mxfp8": Preset(
            block_formats.mxfp8,
            "e4m3 in blocks of 32 with scales of powers of two",
            "hardware with OCP Microscaling formats",
            "",
        ),
        "mxfp6": Preset(
            block_formats.mxfp6,
            "6-bit floats in blocks of 32",
            "hardware with OCP Microscaling formats",
            "",
        ),
        "mxfp4": Preset(
            block_formats.mxfp4,
            "4-bit floats in blocks of 32",
            "hardware with OCP Microscaling formats",
            "",
        ),
        "mxint8": Preset(
            block_formats.mxint8,
            "int8 in blocks of 32 with scales of powers of two",
            "hardware with OCP Microscaling formats",
            "",
        ),
        "nvfp4": Preset(
            block_formats.nvfp4,
            "4-bit floats in blocks of 16 with e4m3 scales",
            "Blackwell GPUs of NVIDIA",
            "",
        ),
    }
)
