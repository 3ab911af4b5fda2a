"""Which form a target takes of floats in blocks."""

import types

import jax
import numpy as np
import pytest

from aqtlite.lowering.forms import block_forms, processor
from aqtlite.lowering.forms.block_forms import BlockType
from aqtlite.lowering.target import Target

E8M0, E4M3 = np.dtype(jax.numpy.float8_e8m0fnu), np.dtype(jax.numpy.float8_e4m3fn)
MXFP8, MXFP4 = BlockType(3, 2**-9, 448, E8M0, 32), BlockType(1, 0.5, 6, E8M0, 32)
NVFP4, SCALED = BlockType(1, 0.5, 6, E4M3, 16), BlockType(3, 2**-9, 448, None, 128)
CUDA = Target("cuda", 1)


@pytest.mark.parametrize(
    ("target", "lhs", "rhs", "form"),
    [
        (CUDA, MXFP8, MXFP8, "block-scaled"),
        (CUDA, MXFP8, MXFP4, "block-scaled"),
        (CUDA, NVFP4, NVFP4, "block-scaled"),
        (CUDA, NVFP4, MXFP4, "bfloat16"),
        (CUDA, MXFP8._replace(size=24), MXFP8, "bfloat16"),
        (CUDA, NVFP4._replace(mantissa_bits=4), NVFP4, "by block"),
        (CUDA, SCALED, SCALED, "by block"),
        (CUDA, SCALED, MXFP8, "by block"),
        (Target("cuda", 1, is_exported=True), NVFP4, NVFP4, "bfloat16"),
        (Target("cuda", 8), NVFP4, NVFP4, "bfloat16"),
        (Target("rocm", 1), MXFP8, MXFP8, "bfloat16"),
        (Target("tpu", 1), MXFP8, MXFP8, "bfloat16"),
        (Target("tpu", 1), SCALED, SCALED, "by block"),
        (Target("cpu", 1), MXFP8, MXFP8, "float32"),
        (Target("other", 1), MXFP8, MXFP8, "float32"),
    ],
)
def test_form(target, lhs, rhs, form):
    assert block_forms.form_of(target, lhs, rhs, is_dot=True) == form
    of_convolution = block_forms.form_of(target, lhs, rhs, is_dot=False)
    assert of_convolution == ("bfloat16" if form == "block-scaled" else form)


def test_codes():
    """E5M2 is no value of E4M3; values that no dtype holds have no codes."""
    e5m2 = BlockType(2, 2**-16, 57344, E8M0, 32)
    names = [dtype.name for dtype in block_forms.codes_of(e5m2, MXFP4)]
    assert names == ["float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu"]
    assert block_forms.codes_of(e5m2._replace(mantissa_bits=3), MXFP8) is None
    assert block_forms.codes_of(NVFP4._replace(bound=8), NVFP4) is None


@pytest.mark.parametrize(
    ("backend", "capability", "scales"),
    [("cpu", None, True), ("gpu", "9.0", False), ("gpu", "10.0", True)],
)
def test_which_gpus_scale_blocks(backend, capability, scales, monkeypatch):
    device = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(processor.jax, "default_backend", lambda: backend)
    monkeypatch.setattr(processor.jax, "devices", lambda: [device])
    assert processor.gpu_scales_blocks.__wrapped__() is scales
