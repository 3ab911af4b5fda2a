"""Adapters that start from values of their weights, and those with magnitudes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import aqtlite
from aqtlite import Rule, config
from aqtlite.flax import convert, quantize_model, with_adapters, with_initial_adapters
from aqtlite.flax import nnx as aqt_nnx
from tests.common import normal, relative_error
from tests.program.adapters.test_low_rank import CONTRACTIONS, adapted, trained

pytestmark = pytest.mark.code("quick")

INT4 = config.weight_only(4)
DORA = config.Dora(2, 3)
PISSA = config.Lora(2, 3, init="pissa")
LOFTQ = config.Dora(2, 3, init="loftq")


@pytest.mark.parametrize(
    ("case", "lora", "cfg"),
    [
        ("batch", DORA, None),
        ("convolution", DORA, INT4),
        ("experts", LOFTQ, INT4),
        ("weight first", PISSA, INT4),
        ("two axes", PISSA, None),
    ],
)
def test_every_contraction(case, lora, cfg):
    fn, shape, shape_of_x = CONTRACTIONS[case]
    w, x = normal(shape, 1), normal(shape_of_x, 2)
    fn_q = adapted(fn, cfg, lora)
    params, state = aqtlite.with_initial_adapters(fn_q, w, x)
    plain = aqtlite.quantize_function(fn, [Rule(cfg=cfg)], params=0)
    error = relative_error(fn_q(state, params, x)[0], fn(w, x))
    of_rounding = relative_error(plain(w, x), fn(w, x))
    if lora.init == "zero":
        assert error == pytest.approx(of_rounding, abs=1e-6)
    else:
        assert error < 0.9 * of_rounding + 1e-6
    state = trained(state)
    merged = aqtlite.merge_adapters(fn_q, params, x, state=state)
    assert relative_error(fn_q(state, params, x)[0], fn(merged, x)) < 1e-5


def test_loftq_starts_from_the_rounding_error_of_rotated_weights():
    cfg = config.update(INT4, {"fwd.rotation": config.Hadamard()})
    w, x = normal((16, 8), 1), normal((4, 16), 2)
    errors = []
    for lora in (config.Lora(4, 3), config.Lora(4, 3, init="loftq")):
        fn_q = adapted(lambda w, x: x @ w, cfg, lora)
        errors.append(relative_error(fn_q(fn_q.init_state(w, x), w, x)[0], x @ w))
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize("cfg", [None, config.lsq(8)], ids=["float", "learned"])
def test_learned_scales_start_from_what_adapters_leave(cfg):
    """Those of a layer behind adapters, which PiSSA takes out of the weight."""
    params, x = (normal((8, 16), 1), normal((3, 16, 16), 2)), normal((4, 8))

    def layers(params, x):
        first, others = params
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x @ first, others)[0]

    def state_of(*loras):
        first = Rule(path="0", cfg=cfg, adapter=loras[0])
        rules = [first, Rule(path="1", cfg=config.lsq(8), adapter=loras[1])]
        fn_q = aqtlite.quantize_function(layers, rules, params=0)
        _, state = aqtlite.with_initial_adapters(fn_q, params, x)
        return state["params"]["1"]

    wanted = state_of(None, None)
    pissa = config.Lora(2, 4, init="pissa" if cfg is None else "zero")
    got = state_of(pissa, config.Lora(2, 4))
    assert got["lhs"]["step"].shape[0] == 3
    for side in ("lhs", "rhs"):
        assert relative_error(got[side]["step"], wanted[side]["step"]) < 1e-5


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = nn.scan(
            lambda module, x, _: (module(x), None),
            variable_axes={"params": 0, "aqt": 0},
            split_rngs={"params": True},
            length=2,
        )
        return layer(nn.Dense(16, name="layers"), x, None)[0]


@pytest.mark.parametrize("lora", [DORA, PISSA])
def test_scanned_layers_are_served_as_they_train(lora):
    model, x = (
        quantize_model(Scanned(), [Rule(cfg=INT4, adapter=lora)]),
        normal((2, 16)),
    )
    shapes = jax.eval_shape(Scanned().init, jax.random.key(0), x)
    variables = jax.tree.map(lambda one: normal(one.shape), shapes)
    started = with_initial_adapters(model, variables, x)
    base = convert(model, started, x)
    np.testing.assert_array_equal(model.apply(base, x), model.apply(started, x))
    if lora is PISSA:
        return
    # Of a base that is converted already, they are the same.
    base = convert(model, variables, x)
    adapters = model.init_adapters(base, x)
    whole = with_adapters(base, adapters)
    np.testing.assert_array_equal(model.apply(whole, x), model.apply(started, x))
    gradient = jax.grad(lambda a: model.apply(with_adapters(base, a), x).sum())
    ((entry,),) = (one.values() for one in gradient(adapters).values())
    assert jnp.any(entry["adapter"]["magnitude"] != 0)


def test_nnx():
    layer, x = nnx.Linear(16, 8, rngs=nnx.Rngs(0)), normal((2, 16))
    wanted, before = layer(x), layer.kernel.get_value()
    model = aqt_nnx.quantize_model(layer, [Rule(cfg=None, adapter=PISSA)])
    for _ in range(2):  # Once more, it changes nothing.
        aqt_nnx.init_state(model, x)
        assert relative_error(model(x), wanted) < 1e-6
    after = model.kernel.get_value()
    assert jnp.linalg.matrix_rank(before - after, rtol=1e-4) == 2
    model = aqt_nnx.quantize_model(layer, [Rule(cfg=INT4, adapter=DORA)])
    serving = aqt_nnx.convert(model, x)
    for one in (model, serving):
        aqt_nnx.init_state(one, x)
    np.testing.assert_array_equal(serving(x), model(x))


def test_errors():
    fn_q, w, x = adapted(jnp.matmul, None, PISSA), normal((4, 4)), normal((4, 4))
    with pytest.raises(ValueError, match=r"both with aqtlite\.with_initial_adapters"):
        fn_q.init_state(w, x)
    model = quantize_model(nn.Dense(8), [Rule(cfg=INT4, adapter=LOFTQ)])
    variables = {"params": {"kernel": normal((4, 8)), "bias": jnp.zeros(8)}}
    with pytest.raises(ValueError, match="starts from its float weight .* is frozen"):
        model.init_adapters(convert(model, variables, x), x)
    with pytest.raises(ValueError, match="init must be one of zero, loftq, pissa"):
        config.Lora(2, 3, init="svd")
    with pytest.raises(ValueError, match="takes an alpha other than 0"):
        config.Lora(2, 0, init="loftq")
    smooth = config.update(INT4, {"fwd.rotation": config.Hadamard()})
    fn_q = adapted(lambda w, x: x @ w, smooth, DORA)
    with pytest.raises(ValueError, match=r"magnitudes \(config\.Dora\) take weights"):
        fn_q.init_state(normal((64, 8)), normal((2, 64)))
    assert config.from_json(config.to_json(LOFTQ)) == LOFTQ
