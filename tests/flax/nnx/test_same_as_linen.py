"""Linen and NNX give equal bits on equal weights."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aqtlite import config
from aqtlite import flax as aqt_flax
from aqtlite.flax import nnx as aqt_nnx
from tests.common import mostly_slow, normal
from tests.flax.nnx.models import CFG, Mlp, X, call
from tests.flax.support import init

# Attention of NNX lays out its products otherwise, and so the noise on gradients.
NEAREST = config.fully_quantized(use_stochastic_rounding=False)
IMAGES = normal((2, 6, 6, 3))


class LinenMlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        dot_general = aqt_flax.AqtDotGeneral(CFG)
        x = nn.relu(nn.Dense(16, dot_general=dot_general, name="up")(x))
        return nn.Dense(4, dot_general=dot_general, name="down")(x)


class Attending(nn.Module):
    """The head of a tied embedding."""

    @nn.compact
    def __call__(self, x):
        return nn.Embed(16, 8, name="embed").attend(x)


class NnxAttending(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.embed.attend(x)


PAIRS = {
    "conv": (
        nn.Conv(4, (3, 3), conv_general_dilated=aqt_flax.AqtConvGeneralDilated(CFG)),
        lambda rngs: nnx.Conv(3, 4, (3, 3), rngs=rngs),
        IMAGES,
    ),
    "mlp": (LinenMlp(), Mlp, X),
    "attention": (
        aqt_flax.quantize_model(nn.MultiHeadDotProductAttention(2), NEAREST),
        lambda rngs: nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs),
        X[None],
    ),
    "einsum": (
        aqt_flax.quantize_model(nn.Einsum((2, 8, 4), "bd,hdn->bhn"), CFG),
        lambda rngs: nnx.Einsum("bd,hdn->bhn", (2, 8, 4), (2, 4), rngs=rngs),
        X,
    ),
    "attend": (aqt_flax.quantize_model(Attending(), CFG), NnxAttending, X),
}


@pytest.mark.parametrize("name", mostly_slow(PAIRS, "mlp"))
def test_forward_gradients_and_serving(name):
    linen, make, x = PAIRS[name]
    variables = init(linen, x)
    inner = make(nnx.Rngs(0))
    nnx.update(inner, nnx.State(variables["params"]))
    cfg = NEAREST if name == "attention" else CFG
    model = aqt_nnx.quantize_model(inner, cfg)

    def linen_loss(params):
        out = linen.apply({"params": params}, x)
        return jnp.sum(out**2), out

    def nnx_loss(model):
        out = model(x)
        return jnp.sum(out**2), out

    expected, expected_out = jax.jit(jax.grad(linen_loss, has_aux=True))(
        variables["params"]
    )
    grads, out = nnx.jit(nnx.grad(nnx_loss, has_aux=True))(model)
    np.testing.assert_array_equal(out, expected_out)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(grads), expected)
    served = jax.jit(linen.apply)(aqt_flax.convert(linen, variables, x), x)
    np.testing.assert_array_equal(call(aqt_nnx.convert(model, x), x), served)
