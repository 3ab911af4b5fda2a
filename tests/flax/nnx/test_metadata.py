"""Calls that change the metadata of variables, as those of scanned layers do."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aqtlite.flax.nnx import convert, plan, quantize_model
from tests.flax.nnx.models import CFG, X, call

pytestmark = pytest.mark.code("quick")


class Renaming(nnx.Module):
    def __init__(self, rngs):
        names = {
            "out_sharding": ("in", "out"),
            "eager_sharding": False,
            "tag": ("layers", 0),
        }
        self.linear = nnx.Linear(8, 8, rngs=rngs, kernel_metadata=names)
        self.cache = nnx.Cache(jnp.zeros((4, 8)), tag=("layers", "rows"), old=1)

    def __call__(self, x):
        kernel = self.linear.kernel
        kernel.set_metadata(tag=kernel.get_metadata("tag")[:1])
        x = self.linear(x)
        self.cache.set_metadata(tag=("rows",))
        if "old" in self.cache.get_metadata():
            self.cache.del_metadata("old")
        self.cache[...] += x
        return x


def metadata(model):
    kept = nnx.state(model, (nnx.Param, nnx.Cache))
    return [(path, x.get_metadata()) for path, x in nnx.to_flat_state(kept)]


@pytest.mark.parametrize("run", [lambda m, x: m(x), call], ids=["eager", "jit"])
def test_they_are_quantized_and_change_it(run):
    floats = Renaming(nnx.Rngs(0))
    model = quantize_model(nnx.clone(floats), CFG)
    before = metadata(model)
    assert before == metadata(floats)
    assert len(plan(model, X).quantized()) == 1 and metadata(model) == before
    serving = convert(model, X)
    out = run(floats, X)
    trained = [run(model, X) for _ in range(2)]
    served = [run(serving, X) for _ in range(2)]
    assert metadata(model) == metadata(floats)
    assert (metadata(model) != before) is (run is not call)  # nnx.jit drops changes.
    # A frozen kernel has no axes, and no names of axes.
    kernel = serving.linear.kernel.get_metadata()
    assert kernel["tag"] == model.linear.kernel.get_metadata("tag")
    assert "out_sharding" not in kernel
    assert (trained[0] != out).any()
    np.testing.assert_array_equal(trained, served)
    np.testing.assert_array_equal(model.cache[...], serving.cache[...])
    np.testing.assert_array_equal(model.cache[...], trained[0] + trained[1])
