import dataclasses

import pytest

from aqtlite import numerics
from aqtlite.config import Tensor

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
