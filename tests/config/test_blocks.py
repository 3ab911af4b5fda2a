import pytest

from aqtlite import calibration, config, numerics

pytestmark = pytest.mark.code("quick")

INT8 = numerics.IntSymmetric(bits=8)


def test_counts():
    assert config.Blocks(size=32).count_of(128) == 4
    assert config.Blocks(count=4).count_of(128) == 4
    assert config.Blocks(size=32).count_of(0) == 1
    two = config.Blocks(size=32, remaining_size=16)
    assert two.remaining_count_of(64) == 4
    assert config.Blocks(size=32, fit=True).count_of(7) == 1
    assert config.Blocks(size=32, fit=True).count_of(34) == 2
    assert config.Blocks(size=32, fit=True).count_of(37) == 1
    assert config.Blocks(size=32, fit=True).count_of(2 * 37) == 2
    assert config.Blocks(size=32, fit=True).count_of(5 * 37) == 37
    assert config.Blocks(size=32, fit=True).count_of(4099) == 4099
    assert config.Blocks(size=128, fit=True).count_of(4099) == 1
    assert config.Blocks(size=1, fit=True).count_of(37) == 37
    assert config.Blocks(count=4, fit=True).count_of(6) == 3


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({}, ValueError, "takes a size or a count, got size=None and count=None"),
        ({"size": 4, "count": 4}, ValueError, "give one of them"),
        ({"size": 0}, ValueError, "Blocks.size must be 1 or more, got 0"),
        ({"size": 4.0}, TypeError, "Blocks.size must be an int, got 4.0"),
        ({"size": True}, TypeError, "Blocks.size must be an int, got True"),
        ({"count": -1}, ValueError, "Blocks.count must be 1 or more, got -1"),
        ({"size": 4, "remaining_size": 0}, ValueError, "remaining_size must be 1"),
        ({"size": 4, "pad": None}, TypeError, "Blocks.pad must be a bool, got None"),
        ({"size": 4, "fit": True, "pad": True}, ValueError, "fit=True or pad=True"),
        ({"size": 4, "fit": 1}, TypeError, "Blocks.fit must be a bool, got 1"),
    ],
)
def test_refuses(fields, error, match):
    with pytest.raises(error, match=match):
        config.Blocks(**fields)


def test_does_not_divide():
    with pytest.raises(ValueError, match="size=32 does not divide an axis of 48"):
        config.Blocks(size=32).count_of(48)
    with pytest.raises(ValueError, match="count=5 does not divide an axis of 48"):
        config.Blocks(count=5).count_of(48)


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"blocks": 32, "numerics": INT8}, TypeError, "blocks must be a config.Blocks"),
        ({"blocks": config.Blocks(size=4)}, ValueError, "blocks=.* would have no effe"),
        ({"scale_dtype": "bfloat16"}, ValueError, "scale_dtype=.* would have no effe"),
        (
            {
                "blocks": config.Blocks(size=4),
                "numerics": INT8,
                "calib_shared_axes": "per_tensor",
            },
            ValueError,
            "both say what shares a scale",
        ),
        (
            {
                "blocks": config.Blocks(size=4),
                "numerics": INT8,
                "calibration": calibration.MovingAverage(),
            },
            ValueError,
            "gathers statistics: blocks have none",
        ),
        ({"scale_dtype": "int8", "numerics": INT8}, ValueError, "scale_dtype='int8' i"),
        ({"scale_dtype": "e8m0", "numerics": INT8}, TypeError, "must be a dtype, one"),
        (
            {"scale_dtype": "bfloat16", "po2_scale": True, "numerics": INT8},
            ValueError,
            "po2_scale=True makes scales powers of two",
        ),
        (
            {"scale_shared_axes": (0,), "numerics": INT8},
            ValueError,
            r"scale_shared_axes=\(0,\) is not known",
        ),
        (
            {"scale_shared_axes": "per_tensor", "numerics": INT8},
            ValueError,
            "scale_shared_axes='per_tensor' would have no effect, because scale_dtype",
        ),
        (
            {"scale_shared_axes": "per_tensor"},
            ValueError,
            "scale_shared_axes='per_tensor' would have no effect",
        ),
        (
            {"scale_dtype": "float8_e4m3fn", "numerics": INT8},
            ValueError,
            "each row has a single scale",
        ),
    ],
)
def test_tensor_refuses(fields, error, match):
    with pytest.raises(error, match=match):
        config.Tensor(**fields)


def test_json_and_repr():
    tensor = config.Tensor(
        numerics=INT8,
        blocks=config.Blocks(size=32, fit=True),
        scale_dtype="float8_e8m0fnu",
    )
    assert config.from_json(config.to_json(tensor)) == tensor
    assert "Blocks(size=32, fit=True)" in repr(tensor)
    assert hash(tensor) == hash(config.from_json(config.to_json(tensor)))
    wide = config.Tensor(numerics=INT8, scale_dtype="float32")
    assert wide == config.Tensor(numerics=INT8)
