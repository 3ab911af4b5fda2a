"""Writing of GPTQ: integers of 2, 3, 4 and 8 bits, all weights alike."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.quantized_formats import bits, writing
from aqtlite.qtensor.qtensor import QTensor

_WIDTHS = (2, 3, 4, 8)


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How weights are stored; one for all of a file."""

    bits: int
    group: int
    is_symmetric: bool

    def config(self, in_float: Sequence[str]) -> Mapping[str, Any]:
        """The `quantization_config`; `in_float` are matrices that stay in float.

        Version 1 of the format stores zero points less 1 and has none of 0: weights
        with zero points are written in version 2.
        """
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group,
            "desc_act": False,
            "sym": self.is_symmetric,
            "lm_head": False,
            "static_groups": False,
            "true_sequential": True,
            "damp_percent": 0.01,
            "checkpoint_format": "gptq" if self.is_symmetric else "gptq_v2",
            "dynamic": {f"-:^{re.escape(module)}$": {} for module in in_float},
        }


def pieces(module: str, q: QTensor) -> tuple[Scheme, dict[str, np.ndarray]]:
    """Spreads a weight, (outputs, inputs), over the tensors of the format.

    Raises:
        CheckpointError: if the format has no such weights.
    """
    q = writing.matrix(module, q)
    found = writing.integers_of(module, q)
    outputs, inputs = q.shape
    width = found.bits
    if width not in _WIDTHS or outputs * width % 32 or inputs * width % 32:
        raise CheckpointError(
            f"{module}, {q!r}: GPTQ has 2, 3, 4 and 8 bits, which fill words of 32 "
            "along inputs and outputs"
        )
    scale = writing.of_rows(q.scale, q.shape)
    if scale is None:
        raise CheckpointError(f"{module}, {q!r}, has blocks over several outputs")
    stored = writing.exactly(scale, np.dtype("float16"))
    if stored is None:
        stored = writing.exactly(scale, jnp.dtype("bfloat16"))
    if stored is None:
        raise CheckpointError(
            f"{module}: GPTQ stores scales in 16 bits, and these need more: "
            f"{writing.EXACT_SCALES}"
        )
    middle = 2 ** (width - 1)
    codes = (found.values.astype(np.int16) + middle).astype(np.uint8)
    is_symmetric = found.zero is None
    zero = np.full(scale.shape, middle - 1, np.uint8)
    if found.zero is not None:
        zero = (np.broadcast_to(found.zero, scale.shape) + middle).astype(np.uint8)
    group = q.blocks[1]
    tensors = {
        "qweight": np.ascontiguousarray(bits.to_words(codes, width).T),
        "qzeros": bits.to_words(np.ascontiguousarray(zero.T), width),
        "scales": np.ascontiguousarray(stored.T),
        "g_idx": np.arange(inputs, dtype=np.int32) // group,
    }
    is_one_group = scale.shape[1] == 1
    return Scheme(width, -1 if is_one_group else group, is_symmetric), tensors
