"""Measured contractions of plans, and the rules that follow; no time is asserted."""

import dataclasses
import json
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import export, lax

import aqtlite
import aqtlite.flax.nnx
from aqtlite import Rule, calibration, config, rules
from tests.common import nearest

pytestmark = pytest.mark.code("quick")

INT8 = nearest()


def model(params, x):
    """Two alike layers, one other, three in a scan, and a product of activations."""
    for name in ("layer_0", "layer_1", "head.2"):
        with jax.named_scope(name):
            x = x @ params[name]
    with jax.named_scope("layer_7"):
        x, _ = lax.scan(lambda x, w: (x @ w, None), x, params["scanned"])
    with jax.named_scope("scores"):
        return x @ x.T


PARAMS = {
    "layer_0": jnp.ones((8, 8)),
    "layer_1": jnp.ones((8, 8)),
    "head.2": jnp.ones((8, 4)),
    "scanned": jnp.ones((3, 4, 4)),
}
X = jnp.ones((2, 8))


def planned(given=INT8):
    return aqtlite.plan(model, PARAMS, X, rules=given, params=0)


@pytest.fixture(scope="module")
def measured():
    return aqtlite.measure_serving(planned(), seconds=1e-3)


def slower_at(measurement, paths):
    """The measurement, had the contractions at some paths been slower than float."""

    def changed(one):
        seconds = 3.0 if one.alike[0].path in paths else 1.5
        has_weight = one.served_seconds is not None
        return dataclasses.replace(
            one,
            float_seconds=2.0,
            quantized_seconds=1.0 if has_weight else seconds,
            served_seconds=seconds if has_weight else None,
            resolution_seconds=0.01,
        )

    changes = tuple(map(changed, measurement.contractions))
    return dataclasses.replace(measurement, contractions=changes)


def test_contractions_that_are_alike_are_measured_once(measured):
    assert [[c.path for c in one.alike] for one in measured.contractions] == [
        ["layer_0", "layer_1"],
        ["head.2"],
        ["layer_7"],
        ["scores"],
    ]
    assert [one.num_calls for one in measured.contractions] == [2, 1, 3, 1]
    assert [one.size for one in measured.contractions] == [16, 16, 8, 8]


def test_what_is_timed_in_serving_and_in_training(measured):
    *weights, scores = measured.contractions
    assert scores.served_seconds is None
    assert all(one.served_seconds > 0 for one in weights)
    training = aqtlite.measure_training(planned(), seconds=1e-3).contractions
    assert {one.served_seconds for one in training} == {None}
    for one in (*measured.contractions, *training):
        assert one.float_seconds > 0 and one.quantized_seconds > 0


@pytest.mark.parametrize(
    "given", [INT8, [Rule(path="head.*", cfg=INT8), Rule(cfg=INT8)]]
)
@pytest.mark.parametrize(
    "slower", [{"layer_0"}, {"layer_7"}, {"head.2", "scores"}, {"layer_0", "layer_7"}]
)
def test_the_rules_leave_in_float_what_is_slower(measured, given, slower):
    made = slower_at(dataclasses.replace(measured, plan=planned(given)), slower)
    left = {one.path for one in planned(made.rules).left_float()}
    assert left == slower | ({"layer_1"} if "layer_0" in slower else set())


def test_paths_that_differ_in_numbers_share_a_rule(measured):
    all_layers = slower_at(measured, {"layer_0", "layer_7"})
    assert all_layers.float_rules == (Rule(path=r"layer_\d+", cfg=None),)
    some = slower_at(measured, {"layer_0"})
    assert [one.path for one in some.float_rules] == ["layer_0", "layer_1"]
    assert "  Rule(path='layer_0', cfg=None)" in repr(some).splitlines()


def test_where_quantizing_pays_everywhere_the_rules_stay(measured):
    made = slower_at(measured, set())
    assert "Nothing that rules decide about is slower" in repr(made)
    assert made.float_rules == () and made.rules == measured.plan.rules


def test_where_quantizing_pays_nowhere_one_rule_says_so(measured):
    paths = {one.alike[0].path for one in measured.contractions}
    made = slower_at(measured, paths)
    assert made.rules == (Rule(cfg=None),)
    quantized = aqtlite.quantize_function(model, made.rules, params=0)
    assert (quantized(PARAMS, X) == model(PARAMS, X)).all()


def test_sums_count_calls(measured):
    made = slower_at(measured, {"layer_7"})
    assert made.float_seconds == 2.0 * (2 + 1 + 3 + 1)
    assert made.seconds == 1.5 * (2 + 1) + 3.0 * 3 + 1.5
    assert made.seconds_by_rules == 1.5 * (2 + 1) + 2.0 * 3 + 1.5


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [(1.0, "pays"), (1.9, "even"), (2.1, "even"), (2.3, "does not pay")],
)
def test_a_gain_near_one_is_even(measured, seconds, verdict):
    made = measured.contractions[-1]
    made = dataclasses.replace(made, float_seconds=2.0, quantized_seconds=seconds)
    assert made.verdict == verdict


@pytest.mark.parametrize(
    ("in_float", "quantized", "verdict"),
    [
        (0.5, 0.5, "unresolved"),  # Both too short to be timed.
        (2.0, 2.4, "unresolved"),
        (2.0, 2.6, "does not pay"),
        (2.0, 0.5, "pays"),
        (20.0, 20.4, "even"),
    ],
)
def test_times_that_the_clock_does_not_resolve(measured, in_float, quantized, verdict):
    times = in_float, quantized
    made = dataclasses.replace(measured.contractions[-1], resolution_seconds=0.5)
    made = dataclasses.replace(
        made, float_seconds=in_float, quantized_seconds=quantized
    )
    assert made.verdict == verdict
    row = repr(dataclasses.replace(measured, contractions=(made,)))
    assert f"  {verdict}" in row and ("< 500,000.0" in row) == (0.5 in times)
    assert (" x  " in row) == (verdict != "unresolved")


def test_unresolved_times_decide_nothing(measured):
    def unresolved(measurement, paths):
        changes = [
            dataclasses.replace(one, resolution_seconds=5.0)
            if one.alike[0].path in paths
            else one
            for one in measurement.contractions
        ]
        return dataclasses.replace(measurement, contractions=tuple(changes))

    made = unresolved(slower_at(measured, {"layer_7", "scores"}), {"layer_7", "scores"})
    assert made.float_rules == () and made.min_size == 0
    made = unresolved(slower_at(measured, {"layer_0", "layer_7"}), {"layer_0"})
    assert [one.path for one in made.float_rules] == ["layer_7"]
    assert made.min_size == 16 and made.seconds_by_size(None) == 3.0 * 2 + 2.0 * 5
    made = slower_at(measured, {"layer_0", "head.2", "layer_7", "scores"})
    made = unresolved(made, {one.alike[0].path for one in made.contractions})
    assert made.min_size == 0 and made.rules == made.plan.rules
    assert "No contraction takes long enough" in repr(made)


def test_the_resolution_is_measured(measured):
    for one in measured.contractions:
        assert 0 < one.resolution_seconds <= min(one.float_seconds, one.seconds)


@pytest.mark.parametrize(
    ("slower", "min_size", "seconds"),
    [
        ([], 0, 1.5 * 7),
        (["layer_7", "scores"], 16, 2.0 * 4 + 1.5 * 3),
        (["layer_7"], 16, 2.0 * 4 + 1.5 * 3),
        (["scores"], 0, 3.0 + 1.5 * 6),
        (["layer_0", "head.2", "layer_7", "scores"], None, 2.0 * 7),
    ],
)
def test_the_size_that_decides_best(measured, slower, min_size, seconds):
    made = slower_at(measured, set(slower))
    assert made.min_size == min_size and made.seconds_by_size(min_size) == seconds
    if min_size:
        left = planned(Rule(cfg=INT8, min_size=min_size)).left_float()
        assert {one.path for one in left} == {"layer_7", "scores"}
        assert f"By size alone: Rule(min_size={min_size}, cfg=...)" in repr(made)


def test_the_json_holds_the_times_and_the_rules(measured):
    made = slower_at(measured, {"head.2"})
    fields = json.loads(made.to_json())
    assert rules.from_json(json.dumps(fields["rules"])) == made.rules
    layers, head, *_ = fields["contractions"]
    assert layers["paths"] == ["layer_0", "layer_1"] and layers["verdict"] == "pays"
    assert head["served_seconds"] == 3.0 and head["verdict"] == "does not pay"
    assert fields["min_size"] == 0
    assert "<table>" in made._repr_html_()


def all_operations(params, x, sizes):
    """A convolution, a ragged product, and a product with its weight on the left."""
    dims = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_general_dilated(
        x, params["conv"], (1, 1), "SAME", dimension_numbers=dims
    )
    x = lax.ragged_dot(x.reshape(-1, 4), params["ragged"], sizes)
    return params["left"] @ x


@pytest.mark.parametrize("measure", [aqtlite.measure_serving, aqtlite.measure_training])
def test_every_operation_with_a_state(measure):
    params = {
        "conv": jnp.ones((2, 2, 4, 4)),
        "ragged": jnp.ones((2, 4, 4)),
        "left": jnp.ones((3, 8)),
    }
    args = (params, jnp.ones((2, 2, 2, 4)), jnp.array([5, 3]))
    plan = aqtlite.plan(all_operations, *args, rules=config.static_int8(), params=0)
    one, two, three = measure(plan, seconds=1e-3).contractions
    assert all(0 < each.seconds < math.inf for each in (one, two, three))


def test_injected_configs_are_measured_and_no_rule_is_made_for_them():
    dot_general = aqtlite.flax.nnx.AqtDotGeneral(INT8)
    layer = nnx.Linear(8, 4, dot_general=dot_general, rngs=nnx.Rngs(0))
    layer = aqtlite.flax.nnx.quantize_model(layer, [])
    plan = aqtlite.flax.nnx.plan(layer, X)
    made = slower_at(
        aqtlite.measure_serving(plan, seconds=1e-3), {plan.contractions[0].path}
    )
    assert made.contractions[0].verdict == "does not pay" and made.rules == ()
    assert made.min_size == 0


@config.register
@dataclasses.dataclass(frozen=True)
class Counted(calibration.AbsMax):
    """Counts how often it is run by Python: once for each compiled program."""

    runs: ClassVar[list] = []

    def bound(self, *args, **kwargs):
        self.runs.append(args)
        return super().bound(*args, **kwargs)


def test_calls_are_compiled_where_jit_is_disabled():
    cfg = config.update(INT8, {"fwd.*.calibration": Counted()})
    plan = aqtlite.plan(jnp.matmul, X, X.T, rules=cfg)
    with jax.disable_jit():
        aqtlite.measure_serving(plan, seconds=1e-3)
    assert len(Counted.runs) == 2


def test_mistakes():
    with pytest.raises(ValueError, match="nothing to measure.*\n  layer_0: no rule"):
        aqtlite.measure_serving(planned([]))
    for seconds in (0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"positive and finite, got {seconds}"):
            aqtlite.measure_training(planned(), seconds=seconds)
    with pytest.raises(TypeError, match="seconds must be a number, got '1'"):
        aqtlite.measure_training(planned(), seconds="1")
    with pytest.raises(TypeError, match="takes a plan.*got QuantizedFunction"):
        aqtlite.measure_serving(aqtlite.quantize_function(jnp.matmul, INT8))
    with pytest.raises(ValueError, match="call it outside of jax.jit"):
        jax.jit(lambda x: aqtlite.measure_serving(planned()))(X)
    rows = jax.ShapeDtypeStruct(export.symbolic_shape("b, 8"), jnp.float32)
    plan = aqtlite.plan(
        jnp.matmul, X.T, rows.update(shape=(2, rows.shape[0])), rules=INT8
    )
    with pytest.raises(ValueError, match="has a symbolic shape"):
        aqtlite.measure_serving(plan)
