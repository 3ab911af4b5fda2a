import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite import calibration, config, numerics
from aqtlite.config import Tensor

pytestmark = pytest.mark.code("quick")

INT8 = numerics.IntSymmetric(bits=8)


def test_is_frozen_and_hashable():
    tensor = Tensor(numerics=INT8)
    assert hash(tensor) == hash(Tensor(numerics=INT8))
    assert {tensor: 1}[Tensor(numerics=INT8)] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        tensor.po2_scale = True


def test_list_of_axes_becomes_a_tuple():
    listed = Tensor(numerics=INT8, calib_shared_axes=[0, -1])
    assert listed == Tensor(numerics=INT8, calib_shared_axes=(0, -1))
    assert hash(listed) == hash(Tensor(numerics=INT8, calib_shared_axes=(0, -1)))


def test_scalars_of_numpy_become_those_of_python():
    of_numpy = Tensor(
        numerics=numerics.IntSymmetric(bits=np.int64(8), preserve_zero=np.bool_(True)),
        calibration=calibration.AbsMax(clipping_scale=np.float32(0.5)),
        calib_shared_axes=(np.int32(-1),),
    )
    of_python = Tensor(
        numerics=INT8,
        calibration=calibration.AbsMax(clipping_scale=0.5),
        calib_shared_axes=(-1,),
    )
    assert repr(of_numpy) == repr(of_python)
    assert config.from_json(config.to_json(of_numpy)) == of_python


def test_properties():
    assert not Tensor().is_quantized and not Tensor().needs_noise
    assert Tensor(numerics=INT8).is_quantized
    assert not Tensor(numerics=INT8).needs_noise
    noisy = numerics.IntSymmetric(
        bits=8, preserve_max_val=True, stochastic_rounding=True
    )
    assert Tensor(numerics=noisy).needs_noise


@pytest.mark.parametrize(
    ("axes", "error", "match"),
    [
        ((), ValueError, "calib_shared_axes is empty; give a tuple"),
        ((0, 1, 0), ValueError, r"\(0, 1, 0\) repeats an axis"),
        ("per_channel", ValueError, 'per_channel.* is not known; .*"per_tensor"'),
        ((True,), TypeError, "holds True, which is not an int"),
        ((1.0,), TypeError, "holds 1.0, which is not an int"),
        (3, TypeError, "calib_shared_axes=3 is not a tuple"),
    ],
)
def test_refuses_axes(axes, error, match):
    with pytest.raises(error, match=match):
        Tensor(numerics=INT8, calib_shared_axes=axes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("calib_shared_axes", (0,)),
        ("calib_shared_axes", "per_tensor"),
        ("po2_scale", True),
        ("use_fake_quant", True),
    ],
)
def test_refuses_what_would_have_no_effect(name, value):
    with pytest.raises(ValueError, match=f"^{name}=.* would have no effect.*set num"):
        Tensor(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("numerics", 8),
        ("numerics", None),
        ("numerics", numerics.IntSymmetric),
        ("calibration", None),
        ("calibration", "AbsMax"),
        ("scale_stop_grad", 1),
        ("po2_scale", None),
        ("use_fake_quant", "yes"),
        ("use_fwd_quant", 0),
    ],
)
def test_refuses_wrong_types(name, value):
    with pytest.raises(TypeError, match=f"^{name} must be"):
        Tensor(**{name: value})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("int4", "int4 is numerics.IntSymmetric(bits=4)"),
        (jnp.int8, "int8 is numerics.IntSymmetric(bits=8)"),
        (np.dtype("uint8"), "uint8 is numerics.IntAffine(bits=8)"),
        ("float8_e5m2", "is numerics.Float.from_dtype('float8_e5m2')"),
        ("fp8", "fp8 is numerics.Float.from_dtype('float8_e4m3fn')"),
        ("nothing", "got 'nothing'"),
        (4, "got 4"),
    ],
)
def test_a_name_for_a_grid_is_told_what_to_write(name, hint):
    with pytest.raises(TypeError, match=re.escape(hint)):
        config.update(config.qat(), {"fwd.rhs.numerics": name})


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("int4", numerics.IntSymmetric(bits=4)),
        ("uint8", numerics.IntAffine(bits=8)),
        ("float8_e5m2", numerics.Float.from_dtype("float8_e5m2")),
    ],
)
def test_the_hint_is_a_grid_of_that_name(name, grid):
    with pytest.raises(TypeError) as raised:
        config.Tensor(numerics=name)
    assert eval(str(raised.value).rpartition(" is ")[2]) == grid
