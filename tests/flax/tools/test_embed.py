"""Tied embeddings: one frozen table for lookups and `attend`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from aqtlite import calibration, checkpoint, config
from aqtlite.flax import AqtDotGeneral, AqtEmbed, AqtTake, convert
from tests.checkpoint.support import save
from tests.common import left_in_float, quick_jit, rms_error
from tests.flax.support import INT8, apply, assert_equal, check_served, init

pytestmark = pytest.mark.code("quick")

TOKENS = jnp.array([[3, 1, 19], [0, 7, 7]])


class Tied(nn.Module):
    """Looks a table up, and contracts it for the logits."""

    cfg: config.DotGeneral | None = INT8
    take: AqtTake | None = AqtTake(INT8)
    dtype: object = None

    @nn.compact
    def __call__(self, tokens):
        embed = AqtEmbed(
            num_embeddings=20,
            features=8,
            dtype=self.dtype,
            dot_general=self.cfg and AqtDotGeneral(self.cfg),
            take=self.take,
            name="Embed_0",
        )
        return embed.attend(nn.LayerNorm()(embed(tokens)))


@pytest.mark.code("users")
@pytest.mark.parametrize(
    ("cfg", "dtype"),
    [(INT8, jnp.bfloat16), (config.weight_only(bits=4), None)],
    ids=["bfloat16", "int4 weights"],
)
def test_one_frozen_table_serves_both(cfg, dtype):
    serving = check_served(Tied(cfg, AqtTake(cfg), dtype), TOKENS, frozen=1)
    assert not left_in_float(serving["params"]["Embed_0"])
    table = serving["aqt"]["Embed_0"]["embedding"]["rhs"]
    assert table.shape == (20, 8) and table.scale.shape == (20, 1)


@pytest.mark.code("users")
def test_float_lookups_keep_the_float_table():
    serving = check_served(Tied(take=None), TOKENS, frozen=0)
    assert serving["params"]["Embed_0"]["embedding"].shape == (20, 8)


@pytest.mark.code("users")
def test_lookups_alone_are_frozen():
    serving = check_served(AqtEmbed(20, 8, take=AqtTake(INT8)), TOKENS, frozen=1)
    assert not left_in_float(serving["params"])


def test_values_and_gradients():
    tied = Tied()
    variables = init(tied, TOKENS)

    def step(model, variables):
        def loss(variables):
            out = model.apply(variables, TOKENS)
            return (out**2).sum(), out

        return jax.grad(loss, has_aux=True)(variables)

    got, out = quick_jit(lambda v: step(tied, v))(variables)
    wanted, float_out = quick_jit(lambda v: step(Tied(None, None), v))(variables)
    assert rms_error(out, float_out) < 0.02
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert rms_error(a, b) < 0.03
    # Rows of the table, and not something like them.
    table = variables["params"]["Embed_0"]["embedding"]
    rows = AqtEmbed(20, 8, take=AqtTake(INT8)).apply(
        {"params": {"embedding": table}}, TOKENS
    )
    step_size = jnp.abs(table).max(1)[TOKENS][..., None] / 127
    assert (jnp.abs(rows - table[TOKENS]) <= 0.501 * step_size).all()


def test_without_a_config_it_is_an_embed():
    variables = init(nn.Embed(20, 8), TOKENS)
    x = jnp.ones((2, 8))
    for model in (AqtEmbed(20, 8), AqtEmbed(20, 8, take=AqtTake(None))):
        np.testing.assert_array_equal(
            model.apply(variables, TOKENS), nn.Embed(20, 8).apply(variables, TOKENS)
        )
        np.testing.assert_array_equal(
            model.apply(variables, x, method="attend"),
            nn.Embed(20, 8).apply(variables, x, method="attend"),
        )


def test_rows_out_of_range_are_nan():
    model = AqtEmbed(20, 8, take=AqtTake(INT8))
    variables = init(model, TOKENS)
    tokens = jnp.array([3, 20])
    serving = convert(model, variables, tokens)
    for one in (variables, serving):
        out = model.apply(one, tokens)
        assert jnp.isnan(out[1]).all() and not jnp.isnan(out[0]).any()


def test_converted_on_disk(tmp_path):
    model = Tied()
    variables = init(model, TOKENS)
    source = save(tmp_path / "float", variables, "msgpack")
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, TOKENS)
    loaded = checkpoint.load_serving(tmp_path / "out", model)
    assert_equal(apply(model, variables, TOKENS), apply(model, loaded, TOKENS))
    assert not left_in_float(loaded["params"]["Embed_0"])


@pytest.mark.parametrize(
    ("update", "what"),
    [
        ({"fwd.rhs.calibration": calibration.LSQ()}, "fwd.rhs.calibration=LSQ"),
        ({"fwd.smoothing": config.Smoothing()}, "fwd.smoothing"),
    ],
)
def test_scales_that_a_lookup_cannot_know(update, what):
    cfg = config.update(config.qat(bits=8), update)
    with pytest.raises(ValueError, match=f"{what}.*a lookup has neither"):
        AqtTake(cfg)(jnp.ones((4, 4)), TOKENS)


def test_refuses_what_is_no_index_and_no_table():
    with pytest.raises(TypeError, match="looked up by integers, got float32"):
        AqtEmbed(20, 8, take=AqtTake(INT8)).init(jax.random.key(0), jnp.ones(3))
    with pytest.raises(ValueError, match="two axes, got shape"):
        AqtTake(INT8)(jnp.ones((2, 3, 4)), TOKENS)
    with pytest.raises(TypeError, match="indices of rows, got float32 of shape"):
        AqtTake(INT8)(jnp.ones((3, 4)), jnp.ones(2))


def test_refuses_a_table_of_integers():
    with pytest.raises(TypeError, match="fwd.rhs must be float32.*got int32"):
        AqtTake(INT8)(jnp.ones((3, 4), jnp.int32), TOKENS)
