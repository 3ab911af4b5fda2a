"""Files that the formats' own packages wrote, against what these packages decode."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite import checkpoint
from aqtlite.qtensor.qtensor import QTensor
from tests.checkpoint.quantized_formats import edited

pytestmark = pytest.mark.code("quick")

FOLDER = pathlib.Path(__file__).parent.parent / "formats_written_by_others"
CASES = sorted(path.parent.name for path in FOLDER.glob("*/decoded.npz"))
# bitsandbytes multiplies int8 by the scale and by 1/127 in two steps.
ROUNDED_TWICE = {"bnb_int8"}


def bits(x):
    return np.asarray(x).view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


@pytest.mark.parametrize("case", CASES)
def test_decoded_as_the_package_does(case):
    loaded = checkpoint.load_quantized(FOLDER / case)
    decoded = np.load(FOLDER / case / "decoded.npz")
    for key, wanted in decoded.items():
        name, _, dtype = key.partition("@")
        q = loaded[name]
        assert loaded.weights[name].shape == q.shape == wanted.shape
        if isinstance(q, QTensor):
            got = np.asarray(q.astype(dtype).dequant())
        else:
            got = q.astype(np.float32)
        wanted = wanted.astype(jnp.dtype(dtype))
        if case in ROUNDED_TWICE:
            np.testing.assert_array_max_ulp(got, wanted, 1)
        else:
            np.testing.assert_array_equal(bits(got), bits(wanted), err_msg=name)


def test_the_version_of_gptq_under_its_other_name(tmp_path):
    name, config = edited.config_of("gptq_4_affine")
    quantization = config["quantization_config"]
    quantization["format"] = quantization.pop("checkpoint_format")
    for one in (quantization, {**quantization, "checkpoint_format": None}):
        config["quantization_config"] = one
        edited.write(tmp_path / "x", edited.tensors_of("gptq_4_affine"), (name, config))
        loaded = checkpoint.load_quantized(tmp_path / "x")
        for key, wanted in checkpoint.load_quantized(FOLDER / "gptq_4_affine").items():
            both = (
                x.dequant() if isinstance(x, QTensor) else x
                for x in (loaded[key], wanted)
            )
            np.testing.assert_array_equal(*both)
