"""What is resolved from a config, an operation and operands."""

import jax.numpy as jnp
import numpy as np
import pytest

import aqtlite
from aqtlite import config, operations
from aqtlite.contraction import execution
from tests.common import normal, tensor
from tests.extensions import e4m3

pytestmark = pytest.mark.code("quick")

X, W = normal((4, 8)), normal((8, 3), 1)
MATMUL = operations.DotGeneral((((1,), (0,)), ((), ())), 2, 2)


def resolve(cfg, lhs=X, rhs=W):
    return execution.resolve(cfg, MATMUL, lhs, rhs, np.dtype("float32"))


def test_fully_quantized():
    how = resolve(config.fully_quantized())
    assert [how.fwd.kind, how.gradient("lhs").kind, how.gradient("rhs").kind] == [
        "integers"
    ] * 3
    assert how.saves("lhs") == how.saves("rhs") == "quantized"
    assert how.gradient("lhs").rhs.reuse == how.gradient("rhs").rhs.reuse == "stored"
    assert how.gradient("lhs").needs_noise and not how.fwd.needs_noise
    operands = [
        getattr(one, side)
        for one in (how.fwd, how.gradient("lhs"), how.gradient("rhs"))
        for side in ("lhs", "rhs")
    ]
    assert len({operand.salt for operand in operands}) == 6


def test_weight_only():
    how = resolve(config.weight_only())
    assert how.fwd.kind == "mixed" and how.fwd.lhs.form == "float"
    assert how.gradient("lhs").kind == how.gradient("rhs").kind == "float"
    assert (
        how.gradient("lhs").rhs.reuse == "dequantized"
        and how.gradient("rhs").rhs.reuse is None
    )
    assert (how.saves("lhs"), how.saves("rhs")) == ("float", "quantized")


def test_quantized_afresh():
    how = resolve(config.fully_quantized(use_fwd_quant=False))
    assert (
        how.gradient("lhs").rhs.reuse is None and how.gradient("lhs").kind == "integers"
    )
    assert how.saves("lhs") == how.saves("rhs") == "float"


def test_fake_quantization_reuses_what_can_move():
    fake = tensor(8, use_fake_quant=True)
    backward = config.DotGeneralRaw(
        lhs=fake, rhs=tensor(4, use_fwd_quant=True, use_fake_quant=True)
    )
    both = config.DotGeneralRaw(lhs=fake, rhs=fake)
    how = resolve(config.DotGeneral(fwd=both, dlhs=backward, drhs=backward))
    assert how.fwd.lhs.form == "dequantized" and how.fwd.kind == "float"
    assert (
        how.gradient("lhs").rhs.reuse == "stored"
        and how.gradient("lhs").rhs.tensor.use_fake_quant
    )
    varying = tensor(8, use_fake_quant=True, calib_shared_axes=(1,))
    both = config.DotGeneralRaw(lhs=fake, rhs=varying)
    how = resolve(config.DotGeneral(fwd=both, dlhs=backward, drhs=backward))
    assert how.gradient("lhs").rhs.reuse == "dequantized"
    assert how.gradient("lhs").rhs.tensor.numerics == tensor(4).numerics


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, "integers"),
        ({"dg_in_dtype": "bfloat16"}, "integers in float"),
        ({"rhs": e4m3.TENSOR}, "mixed"),
        ({"lhs": e4m3.TENSOR, "rhs": e4m3.TENSOR}, "narrow"),
        ({"lhs": e4m3.TENSOR, "rhs": tensor(None)}, "float"),
    ],
    ids=str,
)
def test_kinds(fields, kind):
    raw = config.DotGeneralRaw(**{"lhs": tensor(8), "rhs": tensor(8), **fields})
    assert resolve(config.DotGeneral(fwd=raw)).fwd.kind == kind


def test_a_qtensor_is_saved_as_it_is():
    q = aqtlite.quantize(W, tensor(8), 0)
    how = resolve(config.fully_quantized(use_fwd_quant=False), X, q)
    assert how.saves("rhs") == "quantized" and how.gradient("lhs").rhs.reuse == "stored"


def test_gradients_of_a_gradient_are_float():
    how = resolve(config.fully_quantized())
    g = jnp.ones((4, 3))
    q = aqtlite.quantize(W, tensor(8), 0)
    inner = execution.resolve_gradient(
        how.gradient("lhs"), MATMUL.gradient("lhs"), g, q
    )
    assert inner.fwd == how.gradient("lhs")
    assert inner.gradient("lhs").kind == inner.gradient("rhs").kind == "float"


def test_records_are_static():
    cfg = config.fully_quantized()
    assert hash(resolve(cfg)) == hash(resolve(cfg)) and resolve(cfg) == resolve(cfg)
    assert resolve(cfg) != resolve(config.weight_only())


def test_tiles_and_dtypes():
    tiles = config.LocalAqt(contraction_axis_shard_count=2)
    cfg = config.update(config.fully_quantized(), {"drhs.local_aqt": tiles})
    how = resolve(cfg, X.astype("bfloat16"))
    assert how.gradient("rhs").lhs.tensor.blocks.count == 2
    assert how.gradient("lhs").lhs.tensor.blocks is None
    assert (
        how.gradient("lhs").out_dtype == jnp.bfloat16
        and how.gradient("rhs").out_dtype == np.float32
    )
