"""A conversion taken apart gives what the whole conversion gives."""

import jax
import pytest

from aqtlite.flax import Call, convert
from aqtlite.flax.linen.convert import plan
from aqtlite.program.serving import conversion
from aqtlite.program.serving.conversion import WeightFreezer
from tests.common import shapes_of
from tests.flax import models
from tests.flax.support import INT8, X, assert_equal, init

MODEL = models.MlpBlock(INT8)


@pytest.mark.parametrize("model, args", [(MODEL, (X,)), (models.Setup(INT8), (X,))])
def test_weight_by_weight(model, args):
    variables = init(model, *args)
    planned = plan(model, shapes_of(variables), [Call(*args)])
    serving = conversion.serving(planned)
    wanted = convert(model, variables, *args)
    assert shapes_of(serving) == shapes_of(wanted)
    leaves = jax.tree.leaves(variables["params"])
    freezer = WeightFreezer()
    for weight in planned.weights:
        made = freezer.freeze(weight, *(leaves[p.number] for p in weight.parameters))
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

    variables = init(MODEL, X)
    planned = plan(MODEL, shapes_of(variables), [Call(X)])
    monkeypatch.setattr(jax.stages.Lowered, "compile", counting)
    conversion.serving(planned)
    leaves, freezer = jax.tree.leaves(variables["params"]), WeightFreezer()
    assert not compiled
    for weight in planned.weights:
        freezer.freeze(weight, *(leaves[p.number] for p in weight.parameters))
    assert len(planned.weights) == 3 and len(compiled) == 1


def test_keep_float():
    variables = shapes_of(init(MODEL, X))
    everything = plan(MODEL, variables, [Call(X)])
    paths = [weight.path for weight in everything.weights]
    assert paths == [(f"Dense_{i}", "kernel", "rhs") for i in range(3)]
    planned = everything.keep_float([paths[1]])
    assert [weight.path for weight in planned.weights] == [paths[0], paths[2]]
    reports = []
    serving = conversion.convert(planned, report=reports.append)
    kept = serving["params"]["Dense_1"]["kernel"]
    assert kept.shape == variables["params"]["Dense_1"]["kernel"].shape
    assert "Dense_1" not in serving["aqt"]
    assert [one.path for one in reports[0].parameters if one.is_frozen] == [
        "Dense_0/kernel",
        "Dense_2/kernel",
    ]
    assert len(everything.weights) == 3
