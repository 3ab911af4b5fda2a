"""Arrays, configs and rules of aqtp and Qwix in place of ours: errors that say so."""

import jax.numpy as jnp
import pytest
import qwix
from aqt.jax.v2 import aqt_quantizer
from aqt.jax.v2 import config as aqtp_config
from flax import nnx

import aqtlite
from aqtlite import config
from aqtlite.flax import AqtDotGeneral, AqtEinsum, AqtTake
from aqtlite.flax import nnx as aqt_nnx
from tests.common import MATMUL, tensor

CFG = config.fully_quantized()
X, W = jnp.ones((4, 16)), jnp.ones((16, 8))

ARRAYS = {
    "QArray of qwix": lambda: qwix.quantize(W, "int8"),
    "QTensor of aqt": lambda: aqt_quantizer.quantizer_make(8).quant(
        W, calibration_axes=(0,)
    )[0],
}

TAKING = {
    "dot_general": lambda q: aqtlite.make_dot_general(CFG)(X, q, MATMUL),
    "in float": lambda q: aqtlite.make_dot_general(None)(q, W, MATMUL),
    "einsum": lambda q: aqtlite.einsum("bk,kn->bn", X, q, cfg=CFG),
    "einsum of three": lambda q: aqtlite.einsum("bk,kn,n->b", X, q, W[0], cfg=CFG),
    "ragged_dot": lambda q: aqtlite.make_ragged_dot(CFG)(X, q, jnp.array([4])),
    "quantize": lambda q: aqtlite.quantize(q, tensor(8), 0),
    "Linen": lambda q: AqtDotGeneral(CFG)(X, q, MATMUL),
    "Linen's einsum": lambda q: AqtEinsum(CFG)("bk,kn->bn", X, q),
    "a lookup": lambda q: AqtTake(CFG)(q, jnp.array([1])),
    "NNX": lambda q: aqt_nnx.AqtDotGeneral(CFG)(X, q, MATMUL),
}


@pytest.mark.parametrize("array", ARRAYS)
@pytest.mark.parametrize("take", TAKING.values(), ids=TAKING)
def test_quantized_arrays(array, take):
    """`jnp.asarray` would never come to the end of aqtp's."""
    with pytest.raises(TypeError, match=f"must be an array, got {array}; .*QTensor"):
        take(ARRAYS[array]())


@pytest.mark.parametrize(
    "take",
    [aqtlite.make_dot_general, AqtDotGeneral, aqt_nnx.AqtDotGeneral],
)
def test_configs(take):
    with pytest.raises(TypeError, match="None, got DotGeneral of aqt;"):
        take(aqtp_config.fully_quantized())


RULE = qwix.QuantizationRule(weight_qtype="int8")


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        (RULE, "got QuantizationRule of qwix; "),
        ([RULE], r"got a list of \['QuantizationRule of qwix'\]; "),
        ([{"weight_qtype": "int8"}], r"got a list of \['dict'\]; "),
        (qwix.PtqProvider([RULE]), "got PtqProvider of qwix; "),
    ],
)
def test_rules(rules, named):
    layer = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=f"{named}aqtlite.rules.from_qwix reads rules"):
        aqt_nnx.quantize_model(layer, rules)


def test_a_config_is_no_rule():
    """A config of aqtp can be called, and has no name."""
    with pytest.raises(TypeError, match="got DotGeneral of aqt$"):
        aqtlite.quantize_function(jnp.dot, aqtp_config.fully_quantized())
