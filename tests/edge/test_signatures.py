"""Files of several functions."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter

import aqtlite
from aqtlite import config, edge
from tests.edge import models

pytestmark = pytest.mark.code("quick")


class _Autoencoder(nn.Module):
    def setup(self):
        self.encoder, self.decoder = nn.Dense(96), nn.Dense(64)

    def __call__(self, x):
        return self.decoder(self.encode(x))

    def encode(self, x):
        return nn.relu(self.encoder(x))


def _encode(variables, x):
    return _Autoencoder().apply(variables, x, method="encode")


_WIDE, _NARROW = models.normal((16, 64)), models.normal((1, 64), 2)


@pytest.fixture(scope="module")
def variables():
    return models.trained(_Autoencoder(), _WIDE)


def _run(path, name, x):
    return Interpreter(str(path)).get_signature_runner(name)(input=np.asarray(x))


@pytest.mark.slow
def test_functions_share_the_integers_of_their_weights(tmp_path, variables):
    signatures, sizes = {}, {}
    for name, model, x in (
        ("reconstruct", _Autoencoder(), _WIDE),
        ("encode", _encode, _NARROW),
    ):
        ranges = edge.calibrate(model, variables, [x])
        signatures[name] = edge.Signature(model, variables, ranges, x)
        path = tmp_path / f"{name}.tflite"
        sizes[name] = edge.export(model, variables, ranges, x, path).file.size
    path = tmp_path / "both.tflite"
    reports = edge.export_signatures(signatures, path)
    assert list(reports) == ["reconstruct", "encode"]
    weights = 64 * 96
    assert path.stat().st_size < sizes["reconstruct"] + sizes["encode"] - 0.8 * weights
    assert [one.counts() for one in reports.values()] == [
        {"FULLY_CONNECTED": 2},
        {"FULLY_CONNECTED": 1},
    ]
    for name, one in signatures.items():
        q = np.rint(one.sample_args / reports[name].inputs[0].scale)
        q = np.clip(q + reports[name].inputs[0].zero_point, -128, 127).astype(np.int8)
        found = _run(path, name, q)["output"]
        simulation = edge.simulate(
            one.model, one.variables, one.ranges, one.sample_args
        )
        np.testing.assert_array_equal(found, simulation(q))


def test_functions_without_ranges(tmp_path, variables):
    rules = [aqtlite.Rule(operands="weight", cfg=config.weight_only(8))]
    signatures, expected = {}, {}
    for name, x in (("prefill", _WIDE), ("decode", _NARROW)):
        quantized = aqtlite.quantize_function(_encode, rules, params=0)
        serve, serving = aqtlite.convert_function(quantized, variables, x)
        signatures[name] = edge.Signature(serve, serving, None, x)
        expected[name] = serve(serving, x)
    path = tmp_path / "steps.tflite"
    edge.export_signatures(signatures, path)
    assert path.stat().st_size < 2 * 64 * 96
    for name, x in (("prefill", _WIDE), ("decode", _NARROW)):
        found = _run(path, name, x)["output"]
        np.testing.assert_allclose(found, expected[name], atol=1e-4)


def test_refusals(tmp_path, variables):
    one = edge.Signature(_encode, variables, None, _WIDE)
    with pytest.raises(ValueError, match="an ONNX file has one graph"):
        edge.export_signatures({"encode": one}, tmp_path / "m.onnx")
    with pytest.raises(ValueError, match="there is no signature"):
        edge.export_signatures({}, tmp_path / "m.tflite")
    with pytest.raises(TypeError, match="by name, got 'encode': function"):
        edge.export_signatures({"encode": _encode}, tmp_path / "m.tflite")
    wrong = edge.Signature(lambda v, x: jnp.sort(x), {}, edge.Ranges({}), _WIDE)
    with pytest.raises(ValueError, match="second: these operations have no integer"):
        edge.export_signatures({"first": one, "second": wrong}, tmp_path / "m.tflite")
    with pytest.raises(ValueError, match="encode: interface='uint8' needs ranges"):
        path = tmp_path / "m.tflite"
        edge.export_signatures({"encode": one}, path, interface="uint8")
    assert not list(tmp_path.iterdir())
