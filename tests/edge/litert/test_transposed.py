import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import aqtlite
from aqtlite import config, edge
from aqtlite.edge.litert import floats, transposed
from aqtlite.flax import convert, quantize_model
from tests.edge import models

pytestmark = pytest.mark.code("quick")

# Rank, size of the window, and arguments of `lax.conv_general_dilated`.
GEOMETRIES = {
    "of one axis": (1, 3, (2,), [(2, 1)], {}),
    "of a window of the stride": (1, 2, (2,), [(1, 2)], {}),
    "SAME": (2, 3, (2, 2), [(2, 1), (2, 1)], {}),
    "of a window below the stride": (2, 2, (3, 3), [(1, 2), (1, 2)], {}),
    "cropped": (2, 3, (2, 3), [(-1, 2), (1, 4)], {}),
    "dilated": (2, 3, (2, 2), [(4, 3), (2, 5)], {"rhs_dilation": (2, 1)}),
    "of groups": (2, 3, (2, 1), [(2, 1), (1, 1)], {"feature_group_count": 2}),
    "with strides": (2, 2, (3, 2), [(1, 1), (0, 1)], {"window_strides": (2, 1)}),
}


@pytest.mark.parametrize("has_ranges", [True, False])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_it_computes_what_jax_does(name, has_ranges, tmp_path):
    rank, size, dilation, padding, options = GEOMETRIES[name]
    options = {"window_strides": (1,) * rank, **options}
    groups = options.get("feature_group_count", 1)
    letters = "HW"[:rank]

    def function(kernel, x):
        return lax.conv_general_dilated(
            x,
            kernel,
            padding=padding,
            lhs_dilation=dilation,
            dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
            **options,
        )

    kernel = models.normal((size,) * rank + (4 // groups, 6))
    x, path = models.normal((2, *(5, 4)[:rank], 4), 1), tmp_path / "up.tflite"
    rules, ranges = (), None
    if has_ranges:
        rules = [edge.Rule(op="conv_general_dilated", is_float=True)]
        ranges = edge.calibrate(function, kernel, [x], rules)
    edge.export(function, kernel, ranges, x, path, rules, interface="float")
    (found,) = models.run(path, x)
    np.testing.assert_allclose(found, function(kernel, x), atol=1e-5)


@pytest.mark.parametrize("axes", [1, 2])
def test_frozen_weights_stay_integers(axes, tmp_path):
    model = nn.ConvTranspose(32, (3,) * axes, (2,) * axes, kernel_dilation=axes)
    x = models.normal((1, *(4, 4)[:axes], 64))
    variables = models.trained(model, x)
    rules = [aqtlite.Rule(operands="weight", cfg=config.weight_only(8))]
    quantized = quantize_model(model, rules)
    serving, path = convert(quantized, variables, x), tmp_path / "up.tflite"
    report = edge.export(quantized, serving, None, x, path)
    (found,) = models.run(path, x)
    np.testing.assert_allclose(found, quantized.apply(serving, x), atol=2e-5)
    (one,) = report.contractions
    assert one.asked.startswith("int8")
    kernels = jax.tree.leaves(variables["params"])
    assert path.stat().st_size < sum(map(jnp.size, kernels)) * axes**2 + 8_000


def test_frozen_weights_of_groups_are_reported_in_float(tmp_path):
    def function(params, x):
        return lax.conv_general_dilated(
            x,
            params["kernel"],
            (1, 1),
            [(1, 1), (1, 1)],
            lhs_dilation=(2, 2),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=2,
        )

    params, x = {"kernel": models.normal((2, 2, 2, 6))}, models.normal((1, 4, 4, 4))
    rules = [aqtlite.Rule(operands="weight", cfg=config.weight_only(8))]
    quantized = aqtlite.quantize_function(function, rules, params=0)
    serve, serving = aqtlite.convert_function(quantized, params, x)
    path = tmp_path / "up.tflite"
    report = edge.export(serve, serving, None, x, path)
    (found,) = models.run(path, x)
    np.testing.assert_allclose(found, serve(serving, x), atol=2e-5)
    (one,) = report.contractions
    assert one.asked == "int8 weights" and one.runs_in != "int8"


def test_three_axes_are_refused(tmp_path):
    model, x = nn.ConvTranspose(2, (2, 2, 2), (2, 2, 2)), jnp.ones((1, 2, 2, 2, 1))
    variables, path = model.init(jax.random.key(0), x), tmp_path / "up.tflite"
    with pytest.raises(ValueError, match="in float or not.*\n.*Transpose.*two axes"):
        edge.export(model, variables, None, x, path)
    edge.export(model, variables, None, x, path.with_suffix(".onnx"))


def test_a_file_with_outputs_of_another_shape_is_refused(tmp_path, monkeypatch):
    def function(kernel, x):
        return lax.conv_transpose(x, kernel, (2, 2), "SAME")

    # As JAX computes it, which litert-converter 0.5 gets wrong.
    for module in (floats, transposed):
        monkeypatch.setattr(module, "is_transposed_convolution", lambda operator: False)
    x, kernel = models.normal((1, 5, 5, 4)), models.normal((3, 3, 4, 6))
    path = tmp_path / "up.tflite"
    with pytest.raises(ValueError, match=r"the shape \(1, 12, 12, 6\) when"):
        edge.export(function, kernel, None, x, path, interface="float")
    assert not path.exists()
