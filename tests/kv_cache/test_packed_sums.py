"""Attention to packed caches has the same bits with the kernel and without."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from aqtlite import calibration, config, kv_cache, numerics
from aqtlite.lowering.forms import panel_products
from tests.common import assert_same, normal
from tests.kv_cache.test_few_bits import with_bits

pytestmark = pytest.mark.code("quick")

NAME = "@aqtlite_planes"


@pytest.fixture
def calls_of(monkeypatch):
    """Compiles a function with the kernel and without, compares the results, and
    returns how often it calls the kernel; None where there is none."""

    def check(function, *args):
        results, calls = [], []
        for has_kernel in (True, False):
            with monkeypatch.context() as changed:
                if not has_kernel:
                    changed.setattr(panel_products, "runs_here", lambda: False)
                lowered = jax.jit(lambda *args: function(*args)).lower(*args)
            calls.append(lowered.as_text().count(NAME))
            results.append(lowered.compile()(*args))
        got, wanted = jax.tree.map(lambda x: x.astype(jnp.float32), results)
        assert_same(got, wanted)
        assert not calls[1]
        return calls[0] if panel_products.runs_here() else None

    return check


@dataclasses.dataclass(frozen=True)
class Case:
    cfg: config.DotGeneral
    length: int
    depths: tuple[int, int]
    """Of keys and values."""
    heads: tuple[int, int] = (1, 1)
    """Of queries and keys."""
    dtype: str = "float32"
    window: int | None = None
    positions: int = 1
    calls: int = 2
    """Contractions by the kernel."""

    def inputs(self):
        """Queries, keys and values of two sequences."""
        rows = self.length - (self.window or 1) + 1
        shapes = [(self.positions, self.heads[0], self.depths[0])]
        shapes += [(rows, self.heads[1], depth) for depth in self.depths]
        return [
            normal((2, *shape), seed).astype(self.dtype)
            for seed, shape in enumerate(shapes)
        ]

    def filled(self, key, value):
        """A cache of both sequences."""
        shape = 2, self.length, *key.shape[2:]
        cache = kv_cache.empty(
            shape, self.dtype, self.cfg, value.shape[-1], self.window
        )
        return kv_cache.append(cache, key, value, self.cfg)


WITH_ZERO_POINTS = config.update(
    with_bits(4),
    {
        "fwd.lhs.numerics": numerics.IntAffine(bits=8),
        "fwd.lhs.calibration": calibration.MinMax(),
    },
)

CASES = {
    "int4, odd length": Case(with_bits(4), 70, (64, 80)),
    "int3, grouped queries": Case(with_bits(3), 129, (32, 80), (4, 2), "bfloat16"),
    "int4, rotated, groups, window": Case(
        with_bits(4, config.Hadamard(), config.Blocks(size=32)),
        *(90, (64, 128), (2, 2), "float16", 50, 3),
    ),
    "a short cache": Case(with_bits(2), 40, (13, 7), calls=0),
    "queries with zero points": Case(WITH_ZERO_POINTS, 70, (8, 8), calls=0),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_has_the_same_bits(name, calls_of):
    """With NaN and infinity in queries."""
    case = CASES[name]
    query, key, value = case.inputs()
    query = query.at[0, 0, 0, 0].set(jnp.nan).at[1, 0, 0, -1].set(jnp.inf)

    def attend(query, key, value):
        cache = case.filled(key, value)
        cache = kv_cache.truncate(cache, jnp.array([case.length, key.shape[1] - 2]))
        return kv_cache.attend(query, cache, case.cfg)

    assert calls_of(attend, query, key, value) in (None, case.calls)


def test_gradients_in_a_scan_of_a_vmap(calls_of):
    case = CASES["int4, odd length"]
    inputs = [jnp.stack([x] * 2)[:, :, None] for x in case.inputs()]

    def attend(query, key, value):
        return kv_cache.attend(query, case.filled(key, value), case.cfg)

    def loss(inputs):
        def layer(total, inputs):
            return total + (jax.vmap(attend, 1)(*inputs) ** 2).sum(), None

        return jax.lax.scan(layer, jnp.float32(0), inputs)[0]

    assert calls_of(jax.grad(loss), inputs) in (None, 2)
