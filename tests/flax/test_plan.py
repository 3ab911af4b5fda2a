"""A conversion taken apart gives what the whole conversion gives."""

import jax
import pytest

from aqtlite.flax import convert
from aqtlite.flax.plan import plan
from tests.flax import models
from tests.flax.support import INT8, X, assert_equal, init

MODEL = models.MlpBlock(INT8)


def shapes(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def never(path, inputs):
    return False


@pytest.mark.parametrize("model, args", [(MODEL, (X,)), (models.Setup(INT8), (X,))])
def test_weight_by_weight(model, args):
    variables = init(model, *args)
    planned = plan(model, shapes(variables), args, {}, never)
    wanted = convert(model, variables, *args)
    assert jax.tree.structure(planned.serving) == jax.tree.structure(wanted)
    leaves = jax.tree.leaves(variables["params"])
    for weight in planned.weights:
        made = weight.make(*(leaves[i] for i in weight.inputs))
        node = wanted["aqt"]
        for step in weight.path:
            node = node[step]
        assert_equal(made.qtensor, node)
        assert 0 < float(made.noise) < 1e-3 * float(made.signal)


def test_layers_that_are_the_same_are_compiled_once(monkeypatch):
    compiled = []
    compile_ = jax.stages.Lowered.compile

    def counting(self, *args, **kwargs):
        compiled.append(self)
        return compile_(self, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", counting)
    variables = init(MODEL, X)
    planned = plan(MODEL, shapes(variables), (X,), {}, never)
    assert not compiled
    leaves = jax.tree.leaves(variables["params"])
    for weight in planned.weights:
        weight.make(*(leaves[i] for i in weight.inputs))
    assert len(planned.weights) == 3 and len(compiled) == 1


def test_keep_float():
    variables = shapes(init(MODEL, X))
    asked = []

    def keep(path, inputs):
        asked.append((path, inputs))
        return path[0] == "Dense_1"

    planned = plan(MODEL, variables, (X,), {}, keep)
    assert len(asked) == 3
    assert [weight.path[0] for weight in planned.weights] == ["Dense_0", "Dense_2"]
    kept = planned.serving["params"]["Dense_1"]["kernel"]
    assert kept.shape == variables["params"]["Dense_1"]["kernel"].shape
    assert "Dense_1" not in planned.serving["aqt"]
    assert [one.path for one in planned.report.parameters if one.is_frozen] == [
        "Dense_0/kernel",
        "Dense_2/kernel",
    ]
