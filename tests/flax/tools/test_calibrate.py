"""Static ranges: statistics of activations over batches, in Flax."""

import re
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aqtlite import calibration, config, numerics
from aqtlite.flax import (
    AqtDotGeneral,
    AqtEinsum,
    calibrate,
    calibrate_in_float,
    convert,
    merge_statistics,
    quantize_model,
)
from aqtlite.flax.nnx import calibrate as calibrate_nnx
from aqtlite.testing import assert_served_equals_trained
from tests.common import normal
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

BATCHES = [normal((4, 8), i) * (1 + i) for i in range(3)]
X = BATCHES[0]


def static(how):
    return config.update(
        config.fully_quantized(),
        {"fwd.lhs.calibration": how, "fwd.lhs.calib_shared_axes": "per_tensor"},
    )


def dense(how=None):
    cfg = static(calibration.MaxOverBatches() if how is None else how)
    return nn.Dense(8, dot_general=AqtDotGeneral(cfg))


def high(variables):
    return high_of(variables["aqt_stats"])


def high_of(statistics):
    (entry,) = statistics.values()
    return entry["lhs"].state["ends"]["high"]


class Graph(NamedTuple):
    nodes: jax.Array
    edges: jax.Array | None = None


def test_a_named_tuple_is_one_argument():
    """Unlike a tuple, whose elements are arguments."""

    class OfGraph(nn.Module):
        @nn.compact
        def __call__(self, graph):
            return dense()(graph.nodes)

    variables = init(OfGraph(), Graph(X))
    graphs, tuples = [Graph(x) for x in BATCHES], [(Graph(x),) for x in BATCHES]
    found = [calibrate(OfGraph(), variables, one) for one in (graphs, tuples)]
    got, wanted = (high_of(one["aqt_stats"]["Dense_0"]) for one in found)
    assert got == wanted == LARGEST.max()


LARGEST = np.array([np.abs(x).max() for x in BATCHES], np.float32)


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        (calibration.MaxOverBatches(), LARGEST.max()),
        (calibration.MeanOverBatches(), LARGEST.mean()),
        (
            calibration.MovingAverage(decay=0.5),
            (LARGEST * [0.125, 0.25, 0.5]).sum() / 0.875,
        ),
        (
            calibration.MaxOverBatches(of=calibration.AbsMax(clipping_scale=0.5)),
            LARGEST.max() / 2,
        ),
    ],
    ids=str,
)
def test_statistic(how, wanted):
    model = dense(how)
    variables = calibrate(model, init(model, X), BATCHES)
    (entry,) = variables["aqt_stats"].values()
    found = how.range(X, (0, 1), None, entry["lhs"])
    np.testing.assert_allclose(found.high, [[wanted]], rtol=1e-6)
    assert int(entry["lhs"].batches) == 3


@pytest.mark.code("users")
@pytest.mark.parametrize(
    "how",
    [
        calibration.MaxOverBatches(),
        calibration.MeanOverBatches(),
        calibration.MovingAverage(),
    ],
    ids=str,
)
def test_is_served_bit_for_bit(how):
    model = dense(how)
    variables = calibrate(model, init(model, X), BATCHES)
    serving = convert(model, variables, X)
    assert_served_equals_trained(model, variables, X, serving=serving)


def test_no_reduction_over_activations_is_served():
    """A dynamic scale takes the maximum of each row; a static one is given."""

    def compiled(model, variables):
        serving = convert(model, variables, X)
        program = jax.jit(model.apply).lower(serving, X).compile()
        text = program.as_text()
        entry = text[text.index("ENTRY") :].split("\n}")[0]
        kernels = re.findall(r" (?:fusion|call|dot|reduce|custom-call)\(", entry)
        # Barriers reduce over a first axis that they add.
        over_values = r" reduce-window\(| reduce\(.*dimensions=\{[^0]"
        return len(re.findall(over_values, text)), len(kernels)

    model = dense(calibration.MovingAverage())
    reductions, kernels = compiled(model, calibrate(model, init(model, X), BATCHES))
    assert reductions == 0
    dynamic = nn.Dense(8, dot_general=AqtDotGeneral(config.fully_quantized()))
    of_dynamic, kernels_of_dynamic = compiled(dynamic, init(dynamic, X))
    assert of_dynamic > 0
    assert kernels <= kernels_of_dynamic


def test_the_order_and_the_steps_do_not_matter():
    model = dense()
    variables = init(model, X)
    at_once = calibrate(model, variables, BATCHES)
    in_turn = calibrate(model, calibrate(model, variables, BATCHES[2:]), BATCHES[:2])
    np.testing.assert_array_equal(high(at_once), high(in_turn))


def test_variables_without_the_collection():
    model = dense()
    variables = init(model, X)
    bare = {"params": variables["params"]}
    np.testing.assert_array_equal(
        high(calibrate(model, bare, BATCHES)),
        high(calibrate(model, variables, BATCHES)),
    )


def test_training_updates_them():
    model = dense()
    variables = init(model, X)
    for x in BATCHES:
        _, changed = model.apply(variables, x, mutable=["aqt_stats"])
        variables = {**variables, **changed}
    np.testing.assert_array_equal(
        high(variables), high(calibrate(model, init(model, X), BATCHES))
    )


def test_several_arguments_and_keywords():
    class Attend(nn.Module):
        @nn.compact
        def __call__(self, q, k, *, scale):
            cfg = static(calibration.MaxOverBatches())
            return scale * AqtEinsum(cfg)("btd,bsd->bts", q, k)

    q = normal((2, 3, 4))
    variables = calibrate(Attend(), {"params": {}}, [(q, q), (2 * q, q)], scale=0.5)
    np.testing.assert_array_equal(high(variables), [[[2 * jnp.abs(q).max()]]])


class Two(nn.Module):
    names: tuple[str | None, str | None]

    @nn.compact
    def __call__(self, x):
        first, second = (
            AqtDotGeneral(static(calibration.MaxOverBatches()), name=name)
            for name in self.names
        )
        dims = (((1,), (0,)), ((), ()))
        w = self.param("w", nn.initializers.normal(), (8, 8))
        v = self.param("v", nn.initializers.normal(), (8, 8))
        return second(jnp.abs(first(x, w, dims)), v, dims)


def test_two_contractions_of_one_module_need_names():
    with pytest.raises(ValueError, match="makes two contractions of the same axes"):
        Two((None, None)).init(jax.random.key(0), X)
    model = Two(("in", "out"))
    variables = calibrate(model, init(model, X), BATCHES)
    assert set(variables["aqt_stats"]) == {"in", "out"}
    serving = convert(model, variables, X)
    assert_served_equals_trained(model, variables, X, serving=serving)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.relu(dense()(x)), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        body = nn.scan(
            nn.remat(Layer),
            variable_axes={"params": 0, "aqt": 0, "aqt_stats": 0},
            split_rngs={"params": True},
            length=3,
        )
        return body()(x, None)[0]


@pytest.mark.code("users")
def test_under_a_scan_each_layer_has_its_own():
    model = Scanned()
    variables = calibrate(model, init(model, X), BATCHES)
    (entry,) = jax.tree.leaves(
        variables["aqt_stats"], is_leaf=lambda node: "lhs" in node
    )
    assert entry["lhs"].state["ends"]["high"].shape == (3, 1, 1)
    serving = convert(model, variables, X)
    assert_served_equals_trained(model, variables, X, serving=serving)


@pytest.mark.code("users")
def test_weights_with_statistics_are_frozen_with_them():
    search = calibration.MseSearch((1.0, 0.8))
    cfg = config.update(
        static(calibration.MaxOverBatches()),
        {
            "fwd.rhs.numerics": numerics.IntSymmetric(bits=4),
            "fwd.rhs.calibration": calibration.Periodic(of=search),
            "fwd.rhs.calib_shared_axes": (0,),
        },
    )
    model = nn.Dense(8, dot_general=AqtDotGeneral(cfg))
    variables = calibrate(model, init(model, X), BATCHES)
    serving = convert(model, variables, X)
    assert_served_equals_trained(model, variables, X, serving=serving)


def test_merged_statistics_are_those_of_all_batches():
    by_rules = quantize_model(nn.Dense(8), static(calibration.MaxOverBatches()))
    for model in (by_rules, dense(), Scanned()):
        variables = init(model, X)
        one, other = (
            calibrate(model, variables, part) for part in (BATCHES[:1], BATCHES[1:])
        )
        others = [{"aqt_stats": other["aqt_stats"]}]
        merged = merge_statistics(model, one, others, X)
        wanted = calibrate(model, variables, BATCHES)
        # The batches grow: the last one's range is that in use, however they are split.
        jax.tree.map(np.testing.assert_array_equal, merged, wanted)
    with pytest.raises(ValueError, match="are not of the same model"):
        merge_statistics(model, one, [{}], X)
    serving = convert(model, one, X)
    with pytest.raises(ValueError, match="of 1 arrays of statistics in 'aqt_stats', 0"):
        merge_statistics(model, serving, [serving], X)


def test_errors():
    model = dense()
    variables = init(model, X)
    with pytest.raises(ValueError, match="was given no batch"):
        calibrate(model, variables, [])
    with pytest.raises(TypeError, match="calibrate .* call it outside"):
        jax.eval_shape(lambda v: calibrate(model, v, BATCHES), variables)
    plain = nn.Dense(8, dot_general=AqtDotGeneral(config.fully_quantized()))
    with pytest.raises(ValueError, match="no calibration of the model gathers"):
        calibrate(plain, init(plain, X), BATCHES)
    rows = config.update(
        config.fully_quantized(), {"fwd.lhs.calibration": calibration.MaxOverBatches()}
    )
    with pytest.raises(ValueError, match="each row of a batch would have its own"):
        nn.Dense(8, dot_general=AqtDotGeneral(rows)).init(jax.random.key(0), X)


def test_models_of_the_other_framework():
    of_nnx = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"got Linear; aqtlite.flax.nnx.calibrate tak"):
        calibrate(of_nnx, {}, BATCHES)
    with pytest.raises(TypeError, match=r"aqtlite.flax.nnx.calibrate_in_float takes"):
        calibrate_in_float(of_nnx, {}, BATCHES)
    with pytest.raises(TypeError, match=r"without any, quantize_model\(model, \(\)\)"):
        calibrate_nnx(of_nnx, BATCHES)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_what_is_not_finite_enters_nothing_and_is_said(value):
    model, bad = dense(), X.at[0, 0].set(value)
    with pytest.warns(UserWarning, match=r"dot_general_ab_bc'\]\['lhs'\]: batch 1\."):
        found = calibrate(model, init(model, X), [X, bad])
    wanted = calibrate(model, init(model, X), [X])
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    with pytest.warns(UserWarning, match=r"\['lhs'\]: every batch\."):
        calibrate(model, init(model, X), [bad])


def test_zeros():
    model = dense()
    variables = calibrate(model, init(model, X), [0 * X])
    assert jnp.isfinite(model.apply(variables, 0 * X)).all()


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize(
    "model",
    [dense(), quantize_model(nn.Dense(8), static(calibration.MeanOverBatches()))],
    ids=["injected", "rules"],
)
def test_init_with_an_empty_batch(model, jit):
    variables = calibrate(model, jit(model.init)(jax.random.key(0), X[:0]), BATCHES)
    wanted = calibrate(model, jit(model.init)(jax.random.key(0), X), BATCHES)
    jax.tree.map(np.testing.assert_array_equal, variables, wanted)


def test_activations_are_not_kept():
    """The memory of a call does not grow with the number of layers."""

    def temporary(layers):
        dot_general = AqtDotGeneral(config.static_int8())
        model = nn.Sequential(
            [nn.Dense(16, dot_general=dot_general) for _ in range(layers)]
        )
        x = jax.ShapeDtypeStruct((4096, 16), "float32")
        variables = jax.eval_shape(model.init, jax.random.key(0), x)

        def gathered(variables, x):
            return model.apply(variables, x, mutable=["aqt_stats"])[1]

        compiled = jax.jit(gathered).lower(variables, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(8) < 1.5 * temporary(4)
