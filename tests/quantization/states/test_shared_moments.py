"""Second moments of an input that several contractions read."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aqtlite import config
from aqtlite.flax import (
    AqtDotGeneral,
    calibrate,
    calibrate_in_float,
    convert,
    merge_statistics,
    quantize_model,
)
from aqtlite.flax import nnx as aqtlite_nnx
from aqtlite.quantization.states.second_moment import SecondMoment
from tests.checkpoint.support import assert_same
from tests.common import normal
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

CFG = config.gptq(bits=4, size=8)
X = normal((2, 16, 8))


class Block(nn.Module):
    """A gated MLP behind projections of one input."""

    cfg: config.DotGeneral | None = None
    dtype: str | None = None

    @nn.compact
    def __call__(self, x):
        dot_general = AqtDotGeneral(self.cfg) if self.cfg else jax.lax.dot_general

        def dense(features, name):
            return nn.Dense(
                features, dtype=self.dtype, dot_general=dot_general, name=name
            )

        query, key, value = (dense(8, name)(x) for name in ("query", "key", "value"))
        x = x + query * key + value
        gate, up = dense(16, "gate")(x), dense(16, "up")(x)
        return dense(8, "down")(nn.silu(gate) * up)


class NnxBlock(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.query, self.key, self.value = (
            nnx.Linear(8, 8, rngs=rngs) for _ in range(3)
        )
        self.gate, self.up = (nnx.Linear(8, 16, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        x = x + self.query(x) * self.key(x) + self.value(x)
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


VARIABLES = init(Block(), X)
GROUPS = [{"query", "key", "value"}, {"gate", "up"}, {"down"}]


def moments(statistics):
    """The second moments, by the name of the layer."""
    leaves = jax.tree_util.tree_leaves_with_path(
        statistics, is_leaf=lambda x: isinstance(x, SecondMoment)
    )
    found = {}
    for path, leaf in leaves:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        (name,) = set(names) & set().union(*GROUPS)
        found[name] = leaf.moment
    return found


def groups(found):
    """The names whose moments are one array."""
    by_array = {}
    for name, moment in found.items():
        by_array.setdefault(id(moment), set()).add(name)
    return list(by_array.values())


def assert_grouped(found):
    assert sorted(map(sorted, groups(found))) == sorted(map(sorted, GROUPS))


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("route", ["injected", "rules"])
def test_linen(route, dtype):
    model = Block(CFG, dtype)
    if route == "rules":
        model = quantize_model(Block(dtype=dtype), CFG)
    variables = calibrate_in_float(model, VARIABLES, [X, 2 * X])
    found = moments(variables["aqt_stats"])
    assert_grouped(found)
    rows = np.asarray(X.astype(dtype or "float32"), np.float32).reshape(-1, 8)
    np.testing.assert_allclose(found["key"][0], 5 * rows.T @ rows, rtol=1e-5, atol=1e-4)
    # Continued, and beside ranges that were not shared.
    assert_grouped(moments(calibrate(model, variables, [X])["aqt_stats"]))


def test_nnx():
    model = aqtlite_nnx.quantize_model(NnxBlock(), CFG)
    aqtlite_nnx.calibrate_in_float(model, [X, 2 * X])
    variables = moments(model.aqt.statistics)
    assert_grouped({name: one.get_value() for name, one in variables.items()})


def test_layers_of_a_scan():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return Block(CFG)(x), None

    axes = {"params": 0, "aqt": 0, "aqt_stats": 0}
    layers = nn.scan(Layer, variable_axes=axes, split_rngs={"params": True}, length=2)
    variables = init(layers(), X, None)
    variables = calibrate(layers(), variables, [(X, None), (2 * X, None)])
    found = moments(variables["aqt_stats"])
    assert_grouped(found)
    assert found["key"].shape == (2, 1, 8, 8)


def test_rotations_of_their_own_have_moments_of_their_own():
    rotated = [
        config.update(CFG, {"fwd.rotation": config.Hadamard(seed=i)}) for i in (0, 1)
    ]

    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            names = "query", "key"
            return sum(
                nn.Dense(8, dot_general=AqtDotGeneral(cfg), name=name)(x)
                for cfg, name in zip(rotated, names, strict=True)
            )

    variables = calibrate(Two(), init(Two(), X), [X])
    assert len(groups(moments(variables["aqt_stats"]))) == 2


@pytest.mark.slow
def test_the_rest_is_as_with_arrays_of_their_own():
    shared = calibrate_in_float(Block(CFG), VARIABLES, [X, 2 * X])
    copied = {**shared, "aqt_stats": jax.tree.map(jnp.copy, shared["aqt_stats"])}
    assert len(groups(moments(copied["aqt_stats"]))) == 6
    both = [merge_statistics(Block(CFG), one, [copied], X) for one in (shared, copied)]
    assert_same(*both)
    served = [convert(Block(CFG), one, X) for one in (shared, copied)]
    assert_same(*served)
    further = [calibrate_in_float(Block(CFG), one, [X]) for one in (shared, copied)]
    for one, other in zip(*map(jax.tree.leaves, further), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
