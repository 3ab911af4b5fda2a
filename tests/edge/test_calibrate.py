import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import aqtlite
import aqtlite.flax.nnx
from aqtlite import calibration, config, edge
from aqtlite.calibration import MeanOverBatches, MinMax, MovingAverage
from aqtlite.flax import AqtDotGeneral, quantize_model
from tests.edge import models
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

_W = jnp.eye(3)
_BATCHES = [jnp.full((2, 3), 1.0), jnp.full((2, 3), -3.0), jnp.full((1, 3), 2.0)]


def _function(w, x):
    return jnp.tanh(x @ w)


def test_nothing_that_was_seen_is_clipped():
    ranges = edge.calibrate(_function, _W, _BATCHES)
    assert dict(ranges) == {"input": (-3.0, 2.0), "fully_connected": (-3.0, 2.0)}


@pytest.mark.parametrize(
    "chosen, expected",
    [
        (MeanOverBatches(of=MinMax()), (-1.0, 1.0)),
        (calibration.PercentileOverBatches(100), (-3.0, 2.0)),
        (calibration.MseOverBatches((1.0,)), (-3.0, 2.0)),
        (MinMax(), (-3.0, 2.0)),
    ],
)
def test_calibrations(chosen, expected):
    ranges = edge.calibrate(_function, _W, _BATCHES, calibration=chosen)
    np.testing.assert_allclose(ranges["input"], expected, rtol=0.05)


def test_averages_clip_when_asked():
    found = edge.calibrate(
        _function, _W, _BATCHES, calibration=MovingAverage(of=MinMax(), decay=0.5)
    )
    assert -3 < found["input"].low < 0 < found["input"].high < 2


def test_values_of_one_grid_have_one_range():
    def function(w, x):
        return jnp.concatenate([x @ w, x @ (2 * w)], -1).reshape(-1)

    ranges = edge.calibrate(function, _W, [_BATCHES[0]])
    assert len(ranges) == 2
    assert ranges["fully_connected"] == (0.0, 2.0)


def test_masks_are_no_part_of_a_range():
    mask = np.tril(np.ones((3, 3), bool))

    def function(w, x):
        return jax.nn.softmax(jnp.where(mask, x @ w, -1e9))

    ranges = edge.calibrate(function, _W, [models.normal((3, 3))])
    # What is masked is 10 below the largest element of each row.
    y = models.normal((3, 3)) @ _W
    lowest = min(float(y[i, : i + 1].max()) for i in range(2))
    assert ranges["fully_connected"].low == pytest.approx(lowest - 10)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_nan_in_the_data(bad):
    batches = [_BATCHES[0], _BATCHES[0].at[0, 1].set(bad)]
    with pytest.raises(ValueError, match="batch 1 gives NaN or infinity at 'input'"):
        edge.calibrate(_function, _W, batches)


def test_no_data():
    with pytest.raises(ValueError, match="no batch"):
        edge.calibrate(_function, _W, [])
    with pytest.raises(ValueError, match="batch 0 is empty"):
        edge.calibrate(_function, _W, [jnp.ones((0, 3))])


def test_wrong_calibration():
    with pytest.raises(TypeError, match="one that gathers statistics"):
        edge.calibrate(_function, _W, _BATCHES, calibration="max")


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (nnx.Linear(3, 3, rngs=nnx.Rngs(0)), r"nnx\.state\(model\)"),
        (nn.Dense(3), r"model\.init\(\.\.\.\)"),
    ],
)
def test_modules_without_variables(model, wanted, tmp_path):
    with pytest.raises(TypeError, match=f"variables is None: .* Give {wanted}"):
        edge.calibrate(model, None, _BATCHES)
    with pytest.raises(TypeError, match=f"variables is None: .* Give {wanted}"):
        edge.export(model, None, None, _BATCHES[0], tmp_path / "model.onnx")


def test_no_model():
    with pytest.raises(TypeError, match="must be a Linen module, an NNX module, or"):
        edge.calibrate(3, _W, _BATCHES)


def _quantized(kind):
    """A quantized model and its variables."""
    cfg, x = config.fully_quantized(), models.normal((2, 3))
    dense = nn.Dense(3)
    variables = init(dense, x)
    if kind == "injected":
        return nn.Dense(3, dot_general=AqtDotGeneral(cfg)), variables
    if kind == "rules":
        return quantize_model(dense, cfg), variables
    if kind == "nnx":
        layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        model = aqtlite.flax.nnx.quantize_model(layer, cfg)
        return model, nnx.state(model)
    return aqtlite.quantize_function(_function, cfg, params=0), _W


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("injected", "in Dense"),
        ("rules", "what quantize_model returned"),
        ("nnx", "quantizes contractions itself"),
        ("function", "in the function"),
    ],
)
def test_a_quantized_model(kind, words):
    model, variables = _quantized(kind)
    with pytest.raises((ValueError, TypeError), match=words) as caught:
        edge.calibrate(model, variables, [models.normal((2, 3))])
    assert "made of the float model: give the module" in str(caught.value)
    assert "MODEL(cfg=None)" in str(caught.value)
