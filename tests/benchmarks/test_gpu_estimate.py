"""The estimate for a GPU counts what the kernels of a compiled program move."""

import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import gpu_estimate
from benchmarks.gpu.kernels import Kernel, kernels

PROGRAM = """
HloModule step, is_scheduled=true

%fused_slice (param_0: f32[64,32], param_1: s32[]) -> f32[4,32] {
  %param_0 = f32[64,32]{1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %rows = f32[4,32]{1,0} dynamic-slice(%param_0, %param_1, %zero), \
dynamic_slice_sizes={4,32}
  ROOT %negated = f32[4,32]{1,0} negate(%rows)
}

%fused_update (param_0.1: f32[64,32], param_1.1: f32[4,32], param_2: s32[]) -> \
f32[64,32] {
  %param_0.1 = f32[64,32]{1,0} parameter(0)
  %param_1.1 = f32[4,32]{1,0} parameter(1)
  %param_2 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %updated = f32[64,32]{1,0} dynamic-update-slice(%param_0.1, %param_1.1, \
%param_2, %zero.1)
}

%body (state: (s32[], f32[64,32])) -> (s32[], f32[64,32]) {
  %state = (s32[], f32[64,32]{1,0}) parameter(0)
  %index = s32[] get-tuple-element(%state), index=0
  %x = f32[64,32]{1,0} get-tuple-element(%state), index=1
  %slice = f32[4,32]{1,0} fusion(%x, %index), kind=kLoop, calls=%fused_slice
  %written = f32[64,32]{1,0} fusion(%x, %slice, %index), kind=kLoop, \
calls=%fused_update
  ROOT %next = (s32[], f32[64,32]{1,0}) tuple(%index, %written)
}

%condition (state.1: (s32[], f32[64,32])) -> pred[] {
  %state.1 = (s32[], f32[64,32]{1,0}) parameter(0)
  %index.1 = s32[] get-tuple-element(%state.1), index=0
  ROOT %less = pred[] compare(%index.1, %index.1), direction=LT
}

%once (y: f32[64,32]) -> f32[64,32] {
  %y = f32[64,32]{1,0} parameter(0)
  ROOT %copy.1 = f32[64,32]{0,1} copy(%y)
}

%twice (y.1: f32[64,32]) -> f32[64,32] {
  %y.1 = f32[64,32]{1,0} parameter(0)
  %copy.2 = f32[64,32]{0,1} copy(%y.1)
  ROOT %copy.3 = f32[64,32]{1,0} copy(%copy.2)
}

ENTRY %main (a: s8[64,48], b: s8[48,32], which: pred[]) -> f32[64,32] {
  %a = s8[64,48]{1,0} parameter(0)
  %b = s8[48,32]{BYTES} parameter(1)
  %which = pred[] parameter(2)
  %gemm = (s32[64,32]{1,0}, s8[33554432]{0}) custom-call(%a, %b), \
custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],\
"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[]}}}
  %sums = s32[64,32]{1,0} get-tuple-element(%gemm), index=0
  %wide = f32[64,32]{1,0} bitcast(%sums)
  %zero.2 = s32[] constant(0)
  %start = (s32[], f32[64,32]{1,0}) tuple(%zero.2, %wide)
  %loop = (s32[], f32[64,32]{1,0}) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"16"}}
  %out = f32[64,32]{1,0} get-tuple-element(%loop), index=1
  ROOT %either = f32[64,32]{1,0} conditional(%which, %out, %out), \
true_computation=%twice, false_computation=%once
}
"""

GEMM = Kernel(
    "gemm",
    1,
    64 * 48 + 48 * 32 + 4 * 64 * 32,
    2 * 64 * 32 * 48,
    "int8",
    is_supported=True,
)


def test_kernels_of_a_program():
    """Loops, slices read and written in place, workspaces, and branches."""
    rows = 4 * 4 * 32
    assert kernels(PROGRAM.replace("BYTES", "0,1")) == [
        GEMM,
        Kernel("slice", 16, rows + 4 + rows),
        Kernel("written", 16, rows + 4 + rows),
        Kernel("copy.1", 1, 2 * 4 * 64 * 32),
    ]


def test_int8_that_cublaslt_does_not_multiply():
    first, *_ = kernels(PROGRAM.replace("BYTES", "1,0"))
    assert first.bytes == GEMM.bytes
    assert not first.is_supported


def test_the_roofline_takes_the_slower_of_memory_and_products():
    moving = Kernel("copy", 2, 3350)
    assert gpu_estimate.roofline(moving) == pytest.approx(2e-9)
    product = Kernel("gemm", 1, 8, 1979_000, "int8")
    assert gpu_estimate.roofline(product) == pytest.approx(1e-9)
    assert gpu_estimate.longest([moving, product], 1)[0].endswith(" copy ")


def test_figures_of_a_compiled_program():
    x = jnp.ones((8, 16))
    compiled = jax.jit(lambda x: x @ x.T).lower(x).compile()
    found = gpu_estimate.estimates("product", {"rows": 8}, {"float32": compiled})
    values = {one.case["phase"]: one.median for one in found}
    assert values["moved"] >= 4 * (8 * 16 + 8 * 8)
    assert values["roofline"] >= values["moved"] / gpu_estimate.BANDWIDTH
    assert values["unsupported"] == 0


def test_without_the_plugin_it_says_what_is_missing(tmp_path, capsys):
    written = tmp_path / "estimates.json"
    try:
        gpu_estimate.main(["--small", "--only", "products", "--json", str(written)])
    except SystemExit as refusal:
        assert "no topology 'h100' of cuda" in str(refusal.code)
    else:
        assert "moved, MB" in capsys.readouterr().out
        assert json.loads(written.read_text())["figures"]
