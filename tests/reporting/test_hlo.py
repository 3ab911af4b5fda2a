"""HLO text of other compilers and of other devices, as it is printed, is understood."""

import pathlib

import pytest

from aqtlite.reporting import collectives, copies, hlo, products

pytestmark = pytest.mark.code("quick")

FOLDER = pathlib.Path(__file__).parent
LOOP = (FOLDER / "loop.hlo").read_text()
OTHERS = (FOLDER / "others.hlo").read_text()


def no_path(op_name):
    del op_name
    return ""


def test_products_in_a_loop_count_in_all_steps():
    module = hlo.parse(LOOP)
    [product] = products.find(module)
    assert (product.macs, product.times, product.is_known) == (8 * 64 * 32, 4, True)
    assert product.dtype == "float32"
    unknown = hlo.parse(LOOP.replace("known_trip_count", "other"))
    [product] = products.find(unknown)
    assert (product.times, product.is_known) == (1, False)


def test_a_float_copy_is_followed_into_a_loop():
    [copy] = copies.find(hlo.parse(LOOP), no_path)
    assert copy.kind == "float copy"
    assert copy.argument == "params[\\'up\\']"
    assert (copy.type, copy.bytes, copy.times) == ("float32[64,32]", 8192, 4)


def test_a_sum_of_what_is_read_is_no_copy():
    root = "ROOT %k = f32[64,32]{1,0} convert(%r)"
    summed = root.replace("convert(%r)", "dot(%r, %r)")
    assert root in LOOP
    assert not copies.find(hlo.parse(LOOP.replace(root, summed)), no_path)


def test_forms_of_other_compilers():
    found = {one.opcode: one for one in products.find(hlo.parse(OTHERS))}
    assert found["dot"].kernel == "triton_gemm"
    assert (found["dot"].dtype, found["dot"].macs) == ("int8", 16 * 64 * 32)
    gemm = found["custom-call"]
    assert gemm.kernel == "__cublas$lt$matmul$f8"
    assert (gemm.dtype, gemm.macs) == ("float8_e4m3fn", 16 * 16 * 64)
    # Three of four products with a dilation's zeros are none.
    assert found["convolution"].macs == 2 * 8 * 8 * 6 * (9 * 4) // 4
    assert found["convolution"].dtype == "bfloat16"


def test_collectives():
    module = hlo.parse(OTHERS)
    first, second = collectives.find(module, lambda name: name.split("/")[1])
    assert (first.op, first.dtype, first.bytes) == ("all-gather", "float32", 8192)
    assert first.path == "a"
    assert (second.op, second.bytes) == ("all-gather", 2 * 128)


def test_a_gather_that_is_named_like_an_argument():
    """It is in the scope of what reads it, and its group is given by axes of a mesh."""
    groups = "mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'b'}"
    text = f"""HloModule f, num_partitions=8

ENTRY main (w: f32[4,8]) -> f32[16,8] {{
  w = f32[4,8]{{1,0}} parameter(0), metadata={{op_name="w"}}
  g = f32[16,8]{{1,0}} all-gather(w), replica_groups={groups}, metadata={{op_name="w"}}
  c = f32[16,8]{{0,1}} copy(g)
  ROOT r = f32[16,8]{{1,0}} negate(c), metadata={{op_name="jit(f)/layer/neg"}}
}}
"""
    [one] = collectives.find(hlo.parse(text), lambda name: name)
    assert (one.path, one.devices) == ("jit(f)/layer/neg", 4)
    [alone] = collectives.find(hlo.parse(text.replace("(g)", "(w)")), lambda name: name)
    assert alone.path == "w"


def test_what_a_device_sends_in_a_loop():
    """Of groups of two: half of what is gathered, in each of the counted trips."""
    text = """HloModule f, num_partitions=8

body (s: (s32[], s8[4,8])) -> (s32[], s8[4,8]) {
  s = (s32[], s8[4,8]{1,0}) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  x = s8[4,8]{1,0} get-tuple-element(s), index=1
  g = s8[8,8]{1,0} all-gather(x), replica_groups=[4,2]<=[8], dimensions={0}
  two = s32[] constant(2)
  n = s32[] add(i, two)
  ROOT t = (s32[], s8[4,8]{1,0}) tuple(n, x)
}

condition (s: (s32[], s8[4,8])) -> pred[] {
  s = (s32[], s8[4,8]{1,0}) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  end = s32[] constant(7)
  ROOT c = pred[] compare(i, end), direction=LT
}

ENTRY main (x: s8[4,8]) -> s8[4,8] {
  x = s8[4,8]{1,0} parameter(0)
  zero = s32[] constant(1)
  start = (s32[], s8[4,8]{1,0}) tuple(zero, x)
  w = (s32[], s8[4,8]{1,0}) while(start), condition=condition, body=body
  ROOT r = s8[4,8]{1,0} get-tuple-element(w), index=1
}
"""
    [one] = collectives.of_text(text)
    assert (one.times, one.devices, one.sent) == (3, 2, 3 * 64 // 2)
    assert list(map(str, one.results)) == ["int8[8,8]"]
    [whole] = collectives.of_text(text.replace("replica_groups=[4,2]<=[8], ", ""))
    assert (whole.devices, whole.sent) == (8, 3 * 64 * 7 // 8)


def test_int4_is_half_a_byte_where_its_layout_says_so():
    entry = hlo.parse(OTHERS).entry
    assert entry.instructions["n"].bytes == 1024
    plain = OTHERS.replace(":E(4)", "")
    assert hlo.parse(plain).entry.instructions["n"].bytes == 2048


@pytest.mark.parametrize("text", ["", "HloModule f", "module @jit_f {\n}"])
def test_other_text(text):
    with pytest.raises(ValueError, match="no entry computation"):
        hlo.parse(text)
