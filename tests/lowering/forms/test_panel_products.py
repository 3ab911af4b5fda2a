"""The kernel of int4 and int8 weights: its bits are those of XLA's forms."""

import functools
import importlib.metadata
import itertools
import re

import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import aqtlite
from aqtlite import config, extras
from aqtlite.flax import AqtDotGeneral
from aqtlite.lowering.dot import Dot
from aqtlite.lowering.forms import (
    custom_call,
    integer_products,
    panel_products,
    panels,
    processor,
)
from aqtlite.lowering.forms.integer_products import Instructions
from tests import common
from tests.flax.support import init
from tests.lowering.dots import mixed_dot
from tests.lowering.forms import emulated

LAST_AXES = ((1,), (1,)), ((), ())
OF_BYTES = [one for one in Instructions if not one.takes_int16]
NAME = "aqtlite_panels"


def integers(shape, largest, seed=0):
    values = np.random.default_rng(seed).integers(-largest, largest, shape)
    return values.astype(np.int8)


def in_blocks(cfg, size):
    return config.update(cfg, {"fwd.rhs.blocks": config.Blocks(size=size)})


@pytest.fixture
def without_kernel(monkeypatch):
    """Disables the kernel when called."""
    return lambda: monkeypatch.setattr(panel_products, "runs_here", lambda: False)


@pytest.fixture
def without_vnni(monkeypatch):
    """Has the processor, and its kernel, multiply bytes by AVX2 alone."""
    monkeypatch.setattr(processor, "has_slow_dots_of_bytes", lambda: True)
    monkeypatch.setattr(processor, "adds_products_of_bytes", lambda: False)


@pytest.mark.code("quick")
@pytest.mark.parametrize("columns", [32, 40])
def test_panels_of_another_matrix_are_refused(columns):
    """A kernel would read what lies behind them."""
    weights = integers((columns, 64), 127)
    x = integers((3, 64), 127, seed=1)
    for bits, whole in ((8, weights), (4, jnp.asarray(weights % 8, jnp.int4))):
        packed = panels.of_weights(jnp.asarray(whole))
        panels.check(packed, columns, 64, bits)
        for given in (packed[:-1], packed[:, :-4], packed[:1], packed[None]):
            with pytest.raises(ValueError, match=f"panels of {columns} rows of 64"):
                panel_products.of_matrices(x, given, columns, bits)


def test_it_runs_wherever_llvm_and_avx2_are():
    assert panel_products.runs_here() == processor.multiplies_bytes()


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        pytest.param(1, 16, id="one row and panel"),
        pytest.param(37, 21, id="columns that are no whole vector"),
        pytest.param(64, 1040, id="columns that threads divide"),
    ],
)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("instructions", OF_BYTES)
def test_sums_are_exact_at_the_largest_magnitudes(
    rows, columns, instructions, bits, monkeypatch
):
    widest = integer_products.of_processor()
    if widest is None or instructions > widest:
        return
    monkeypatch.setattr(integer_products, "of_processor", lambda: instructions)
    largest = 2 ** (bits - 1)
    x, w = integers((rows, 512), 128), integers((columns, 512), largest, seed=1)
    x[0, 64:128], x[0, 128:192], w[:2] = -128, 127, [[-largest], [largest - 1]]
    if not panel_products.runs_here() or not panel_products.reads(columns, 512, bits):
        return

    @jax.jit
    def sums(x, w):
        w = w.astype(f"int{bits}")
        return panel_products.of_matrices(x, w, columns, bits)

    for _ in range(20):  # Threads start in another order each time.
        np.testing.assert_array_equal(sums(x, w), x.astype(int) @ w.T.astype(int))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("blocks", [1, 257])
@pytest.mark.parametrize(
    ("instructions", "bits"),
    [*itertools.product(OF_BYTES, (4, 8)), (Instructions.AVX2_INT16, 8)],
)
def test_digits_have_equal_bits_at_the_largest_magnitudes(
    blocks, bits, instructions, dtype, monkeypatch, without_kernel
):
    """Sums of 257 blocks leave float32, and those of two digits int32."""
    products = blocks * instructions.block
    widest = integer_products.of_processor()
    if widest is None or (instructions.has_dots and instructions > widest):
        return
    monkeypatch.setattr(panel_products, "_instructions", lambda *_: instructions)
    x, largest = common.normal((11, products)), 2 ** (bits - 1)
    x = x.at[:5].set([[2], [-2], [1.99], [-1.99], [0]])
    x = x.at[5, 5].set(1e30).at[6, 7].set(jnp.nan)
    w = integers((21, products), largest).astype(f"int{bits}")
    w[:2] = [[-largest], [largest - 1]]
    x = x.astype(dtype)

    def dot(x, w):
        return mixed_dot(x, w, LAST_AXES, out_dtype=x.dtype)

    lowered = jax.jit(lambda x, w: dot(x, w)).lower(x, w)
    assert (NAME in lowered.as_text()) == panel_products.runs_here()
    got = lowered.compile()(x, w)
    without_kernel()
    np.testing.assert_array_equal(got, jax.jit(lambda x, w: dot(x, w))(x, w))


OF_AMX = {
    "int8": config.qat(8),
    "int8_64": in_blocks(config.qat(8), 64),
    "int4": config.w4a8(),
    "int4_128": in_blocks(config.w4a8(), 128),
    "int8 by floats": config.weight_only(8),
    "int4_64 by floats": in_blocks(config.weight_only(4), 64),
}


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(15, 40), (101, 16), pytest.param(37, 1029, id="columns that threads divide")],
)
@pytest.mark.parametrize("cfg", OF_AMX.values(), ids=OF_AMX)
def test_amx_has_equal_bits(cfg, rows, columns, monkeypatch, without_kernel):
    """By other instructions, so that any processor with AVX2 tests it."""
    dense = nn.Dense(columns, dot_general=AqtDotGeneral(cfg))
    x = common.normal((rows, 256)).at[0].set(0).at[-1, 3].set(jnp.nan)
    serving = aqtlite.flax.convert(dense, init(dense, x), x)
    with monkeypatch.context() as patch:
        emulated.take_amx(patch)
        program = aqtlite.compile_serving(dense.apply, serving, x)
        got = program(x)
        if panel_products.runs_here():
            assert emulated.NAME in program.compiled.as_text()
    without_kernel()
    wanted = jax.jit(lambda x: dense.apply(serving, x))(x)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("lhs", "rhs", "contracting"),
    [
        pytest.param((5, 64), (64, 33), ((1,), (0,)), id="columns"),
        pytest.param((64, 5), (64, 1040), ((0,), (0,)), id="transposed rows"),
        pytest.param((96, 3, 16), (96, 33), ((0,), (0,)), id="both transposed"),
        pytest.param(
            (8192, 48), (8192, 16), ((0,), (0,)), id="transposed, a few at a time"
        ),
        pytest.param((64, 32), (40, 64), ((0,), (1,)), id="one of both transposed"),
        pytest.param((5, 3, 32), (2, 17, 32), ((2,), (2,)), id="last of three"),
        pytest.param((4, 5, 16), (4, 40, 16), ((0, 2), (0, 2)), id="apart"),
        pytest.param((5, 32), (40, 32, 2), ((1,), (1,)), id="in the middle"),
        pytest.param((96,), (96, 31), ((0,), (0,)), id="a vector"),
    ],
)
@pytest.mark.parametrize("axes", [None, (0, None), (-1, None), (None, 0), (0, 1)])
def test_without_vnni_it_contracts_int8_along_any_axes(
    lhs, rhs, contracting, axes, without_vnni
):
    dot = Dot((contracting, ((), ())), len(lhs), len(rhs))
    shapes, call = (lhs, rhs), dot.sums
    if axes is not None:
        shapes = tuple(
            shape if axis is None else np.insert(shape, axis % (len(shape) + 1), 3)
            for shape, axis in zip(shapes, axes, strict=True)
        )
        call = jax.vmap(dot.sums, axes)
    x, w = (integers(shape, 129, seed) for seed, shape in enumerate(shapes))
    lowered = jax.jit(lambda x, w: call(x, w)).lower(x, w)
    is_whole = axes is None or None in axes
    assert (NAME in lowered.as_text()) == (panel_products.runs_here() and is_whole)
    wanted = functools.partial(lax.dot_general, dimension_numbers=dot.dims)
    wanted = jax.vmap(wanted, axes) if axes else wanted
    got = lowered.compile()(x, w)
    np.testing.assert_array_equal(got, wanted(x.astype(int), w.astype(int)))


def test_without_vnni_gradients_have_equal_bits(without_vnni, without_kernel):
    dense = nn.Dense(64, dot_general=AqtDotGeneral(config.fully_quantized()))
    x = common.normal((64, 32))
    params = init(dense, x)
    rngs = {"params": jax.random.key(1)}

    def gradients():
        def loss(params, x):
            return jnp.sum(jnp.tanh(dense.apply(params, x, rngs=rngs)))

        lowered = jax.jit(jax.grad(loss, (0, 1))).lower(params, x)
        text = lowered.as_text()
        calls = text.count(NAME), text.count("is_transposed = true")
        return calls, lowered.compile()(params, x)

    calls, got = gradients()
    assert calls == ((3, 1) if panel_products.runs_here() else (0, 0))
    without_kernel()
    calls, wanted = gradients()
    assert calls == (0, 0)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_without_vnni_int16_are_multiplied_from_eight_rows_on(without_vnni):
    w, name = integers((16, 64), 128), rf"{NAME}\w*_{Instructions.AVX2_INT16:d}\b"

    def calls(rows):
        dot = jax.jit(lambda x: mixed_dot(x, w, LAST_AXES, out_dtype=x.dtype))
        return len(re.findall(name, dot.lower(common.normal((rows, 64))).as_text()))

    assert [calls(7), calls(8)] == [0, int(panel_products.runs_here())]


@pytest.mark.slow
def test_served_equals_trained_with_and_without(without_kernel):
    """Layers of three axes and an odd number of columns, with a nonlinearity."""
    cfgs = {
        "weight_only": config.weight_only(4),
        "weight_only_32": in_blocks(config.weight_only(4), 32),
        "weight_only_64": in_blocks(config.weight_only(4), 64),
        "w4a8_32": in_blocks(config.w4a8(), 32),
        "w4a4_64": in_blocks(config.fully_quantized(fwd_bits=4), 64),
        "w8": config.weight_only(8),
        "w8_32": in_blocks(config.weight_only(8), 32),
        "w8a8": config.qat(8),
        "w8a8_64": in_blocks(config.qat(8), 64),
    }
    weights = {name: common.normal((128, 27), i) for i, name in enumerate(cfgs)}
    x = common.normal((2, 5, 128))

    def layers(params, x):
        out = {}
        for name, w in params.items():
            dtype = jnp.bfloat16 if name.endswith("64") else jnp.float32
            with jax.named_scope(name):
                out[name] = jnp.tanh(x.astype(dtype) @ w.astype(dtype) + 1).sum(1)
        return out

    rules = [aqtlite.Rule(path=name, cfg=cfg) for name, cfg in cfgs.items()]
    function = aqtlite.quantize_function(layers, rules, params=0)
    serve, serving = aqtlite.convert_function(function, weights, x)

    call = jax.jit(lambda *args: serve(*args))
    program = aqtlite.compile_serving(serve, serving, x)
    kernel = [jax.jit(function)(weights, x), call(serving, x), program(x)]
    dtypes = [x.dtype for x in jax.tree.leaves(program.compiled.in_avals)]
    of_int4, of_int8 = 0, 0
    if panel_products.runs_here():
        of_int4, of_int8 = 5, 4 * panel_products.reads(27, 128, 8)
    # Blocks of int4 are packed in any case.
    assert dtypes.count(jnp.uint8) == (of_int4 or 4) + of_int8
    calls = call.lower(serving, x).as_text().count(NAME)
    # With VNNI, XLA's products of int8 are as fast for weights as they are.
    of_xla = 0 if panel_products.sums_bytes() else 1
    assert calls == of_int4 + (of_int8 and of_int8 - of_xla)
    without_kernel()
    call = jax.jit(lambda *args: serve(*args))
    assert NAME not in call.lower(serving, x).as_text()
    for one in kernel:
        jax.tree.map(np.testing.assert_array_equal, one, call(serving, x))


@pytest.mark.code("quick")
@pytest.mark.parametrize("packed", [None, "cpu"])
def test_several_contracting_axes_have_equal_bits(packed, without_kernel):
    """As of the projection behind attention, of heads by their width."""

    def spans(cfg, size):
        blocks = config.Blocks(size=size, span_others=True)
        return config.update(cfg, {"fwd.rhs.blocks": blocks})

    cfgs = {
        "w4": config.weight_only(4),
        "w4_32": in_blocks(config.weight_only(4), 32),
        "w4_spans_16": spans(config.weight_only(4), 16),
        "w4a8": config.w4a8(),
        "w4a8_32": in_blocks(config.w4a8(), 32),
        "w4a8_spans_8": spans(config.w4a8(), 8),
        "w8_32": in_blocks(config.weight_only(8), 32),
        "w8a8_spans_8": spans(config.qat(8), 8),
        "both": config.update(
            in_blocks(config.w4a8(), 32), {"fwd.lhs.blocks": config.Blocks(size=16)}
        ),
    }
    weights = {n: common.normal((4, 64, 27), i) for i, n in enumerate(cfgs)}
    x = common.normal((2, 3, 4, 64))

    def layers(params, x):
        out = {}
        for name, w in params.items():
            with jax.named_scope(name):
                out[name] = jnp.tanh(jnp.einsum("abhk,hkn->abn", x, w))
        return out

    rules = [aqtlite.Rule(path=f"{name}/.*", cfg=cfg) for name, cfg in cfgs.items()]
    function = aqtlite.quantize_function(layers, rules, params=0)
    serve, serving = aqtlite.convert_function(function, weights, x, packed=packed)
    call = jax.jit(lambda *args: serve(*args))
    kernel = [
        jax.jit(function)(weights, x),
        call(serving, x),
        aqtlite.compile_serving(serve, serving, x)(x),
    ]
    # Scales of lhs have other tiles than those of rhs.
    calls = len(cfgs) - 1 if panel_products.runs_here() else 0
    # Blocks that span heads are packed in the call.
    of_panels = [x for x in jax.tree.leaves(serving) if x.dtype == jnp.uint8]
    assert len(of_panels) == (len(cfgs) - 3 if packed else 0)
    assert call.lower(serving, x).as_text().count(NAME) == calls
    without_kernel()
    call = jax.jit(lambda *args: serve(*args))
    for one in kernel:
        jax.tree.map(np.testing.assert_array_equal, one, call(serving, x))


def test_what_is_not_finite_stays_so(without_kernel):
    w = common.normal((16, 64))
    x = common.normal((4, 64)).at[1, 3].set(jnp.nan).at[2, 5].set(jnp.inf).at[3].set(0)
    dot = aqtlite.make_dot_general(in_blocks(config.weight_only(4), 32))
    got = jax.jit(lambda x, w: dot(x, w, LAST_AXES))(x, w)
    without_kernel()
    wanted = jax.jit(lambda x, w: dot(x, w, LAST_AXES))(x, w)
    np.testing.assert_array_equal(got, wanted)
    assert np.isfinite(got).all(1).tolist() == [True, False, False, True]


def test_transformations_and_targets_it_is_not_for(without_kernel):
    cfg = in_blocks(config.weight_only(4), 32)
    dot = aqtlite.make_dot_general(cfg)
    x, w = common.normal((3, 4, 64)), common.normal((16, 64))

    def layers(x, w):
        return jax.vmap(lambda x: dot(x, w, LAST_AXES))(x)

    def loss(x, w):
        return jnp.sum(jnp.sin(layers(x, w)))

    got = jax.jit(layers)(x, w), *jax.jit(jax.grad(loss, (0, 1)))(x, w)
    of_one = jax.jit(lambda x, w: dot(x, w, LAST_AXES))
    traced = of_one.trace(x[0], w)
    exported = jax.export.export(of_one, platforms=["cpu", "tpu"])(x[0], w)
    assert (NAME in traced.lower().as_text()) == panel_products.runs_here()
    assert NAME not in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert NAME not in exported.mlir_module()
    np.testing.assert_array_equal(exported.call(x[0], w), of_one(x[0], w))
    without_kernel()
    forward, backward = (
        jax.jit(lambda *args, function=function: function(*args))
        for function in (layers, jax.grad(loss, (0, 1)))
    )
    wanted = forward(x, w), *backward(x, w)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("lhs", "rhs", "dims"),
    [
        pytest.param((2, 40), (8, 40), LAST_AXES, id="products in no whole block"),
        pytest.param((2, 32), (15, 32), LAST_AXES, id="less than a panel"),
        pytest.param((0, 32), (8, 32), LAST_AXES, id="no rows"),
        pytest.param((2, 32), (32, 8), (((1,), (0,)), ((), ())), id="first axis"),
    ],
)
def test_it_takes_whole_blocks_of_last_axes(lhs, rhs, dims):
    lhs, rhs = jnp.zeros(lhs, jnp.int8), jnp.zeros(rhs, jnp.int4)
    assert not panel_products.takes(lhs, rhs, dims)
    assert not panel_products.takes(lhs, rhs.astype(jnp.int8), dims)


def test_an_unknown_interface_or_no_package_leaves_the_forms_of_xla(monkeypatch):
    header = custom_call._header()
    assert custom_call.knows(header)
    assert not custom_call.knows(re.sub("(API_MAJOR) 0", r"\1 1", header))
    renamed = header.replace("XLA_FFI_Future* future;  // out\n};", "int other;\n};")
    assert renamed != header and not custom_call.knows(renamed)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.49.0")
    assert not custom_call.is_available.__wrapped__()
    monkeypatch.setattr(extras, "is_installed", lambda name: False)
    assert not custom_call.is_available.__wrapped__()


def test_llvm_takes_the_instructions_that_xla_may_use(monkeypatch):
    host = {"avx2": True, "avx512vnni": True, "avx512f": True, "amx-int8": False}
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    features = custom_call.features(host)
    assert features == "+avx2,-avx512vnni,-avx512f,-amx-int8"
    monkeypatch.setenv("XLA_FLAGS", "")
    assert custom_call.features(host) == "+avx2,+avx512vnni,+avx512f,-amx-int8"
