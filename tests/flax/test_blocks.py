"""Frozen weights in sub-channel blocks."""

import jax
import pytest
from flax import linen as nn

from aqtlite import checkpoint, config, numerics
from aqtlite.calibration import LSQ
from aqtlite.config import Blocks, DotGeneral, DotGeneralRaw, Tensor
from aqtlite.flax import AqtConvGeneralDilated, AqtDotGeneral, convert
from tests.checkpoint.support import assert_same, save
from tests.common import mostly_slow, normal, rms_error
from tests.flax.support import check_served, init

pytestmark = pytest.mark.code("quick")

X = normal((4, 64))
INT4 = numerics.IntSymmetric(bits=4)
INT8 = numerics.IntSymmetric(bits=8)
SQUARES = Tensor(numerics=INT4, blocks=Blocks(size=16, remaining_size=8))
CONFIGS = {
    "mxfp8": config.mxfp8(),
    "nvfp4": config.nvfp4(),
    "weights of 4 bits": DotGeneral(fwd=DotGeneralRaw(rhs=SQUARES)),
    "padded": DotGeneral(
        fwd=DotGeneralRaw(
            lhs=Tensor(numerics=INT8, blocks=Blocks(size=20, pad=True)),
            rhs=Tensor(
                numerics=INT4, blocks=Blocks(size=10, remaining_size=16, pad=True)
            ),
        )
    ),
    "integers": DotGeneral(
        fwd=DotGeneralRaw(lhs=Tensor(numerics=INT8, blocks=Blocks(size=8)), rhs=SQUARES)
    ),
}


class Model(nn.Module):
    """A layer with one contracting axis, and one with two."""

    cfg: config.DotGeneral

    @nn.compact
    def __call__(self, x):
        dot_general = AqtDotGeneral(self.cfg)
        x = nn.DenseGeneral((4, 16), dot_general=dot_general)(x)
        return nn.DenseGeneral(24, axis=(-2, -1), dot_general=dot_general)(x)


@pytest.mark.code("users")
@pytest.mark.parametrize("name", mostly_slow(CONFIGS, "mxfp8", "weights of 4 bits"))
def test_served_equals_trained(name):
    check_served(Model(CONFIGS[name]), X, frozen=2)


@pytest.mark.parametrize("name", ["mxfp8", "weights of 4 bits", "padded"])
def test_converted_on_disk(name, tmp_path):
    model = Model(CONFIGS[name])
    variables = init(model, X)
    source = save(tmp_path / "float", variables, "msgpack")
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, X)
    loaded = checkpoint.load_serving(tmp_path / "out", model)
    assert_same(loaded, convert(model, variables, X))
    weight = loaded["aqt"]["DenseGeneral_1"]["kernel"]["rhs"]
    sizes = {"mxfp8": (1, 16, 1), "padded": (1, 10, 16)}
    assert weight.blocks == sizes.get(name, (1, 16, 8))
    assert weight.shape == (4, 16, 24)
    assert weight.scale.size < weight.qvalue.size / 8


IMAGES = normal((2, 6, 6, 8))
LEARNED = Tensor(numerics=INT4, calibration=LSQ(), blocks=Blocks(size=4))


class Cnn(nn.Module):
    """A convolution with strides, and a depthwise one."""

    cfg: config.DotGeneral

    @nn.compact
    def __call__(self, x):
        conv = AqtConvGeneralDilated(self.cfg)
        x = nn.Conv(8, (3, 3), strides=2, conv_general_dilated=conv)(x)
        return nn.Conv(8, (3, 3), feature_group_count=8, conv_general_dilated=conv)(x)


@pytest.mark.slow
@pytest.mark.code("users")
@pytest.mark.parametrize("name", ["mxfp8", "integers", "learned"])
def test_convolutions(name, tmp_path):
    cfg = DotGeneral(fwd=DotGeneralRaw(rhs=LEARNED))
    if name == "integers":
        square = Tensor(numerics=INT4, blocks=Blocks(size=4, remaining_size=2))
        lhs = Tensor(numerics=INT8, blocks=Blocks(size=2))
        cfg = DotGeneral(fwd=DotGeneralRaw(lhs=lhs, rhs=square))
    model = Cnn(config.mxfp8() if name == "mxfp8" else cfg)
    variables = init(model, IMAGES)
    check_served(model, IMAGES, frozen=2, variables=variables)
    source = save(tmp_path / "float", variables, "msgpack")
    checkpoint.convert_checkpoint(source, tmp_path / "out", model, IMAGES)
    loaded = checkpoint.load_serving(tmp_path / "out", model)
    assert_same(loaded, convert(model, variables, IMAGES))
    weight = loaded["aqt"]["Conv_0"]["kernel"]["rhs"]
    wanted = {"mxfp8": (3, 3, 8, 1), "integers": (3, 3, 4, 2)}
    assert weight.blocks == wanted.get(name, (3, 3, 4, 1))


def test_trains():
    model = Model(config.mxint8())
    variables = init(model, X)
    gradients = jax.jit(jax.grad(lambda v: (model.apply(v, X) ** 2).sum()))(variables)
    in_float = Model(DotGeneral())
    wanted = jax.jit(jax.grad(lambda v: (in_float.apply(v, X) ** 2).sum()))(variables)
    for got, float_one in zip(*map(jax.tree.leaves, (gradients, wanted)), strict=True):
        assert rms_error(got, float_one) < 0.05


class Unsorted(nn.Module):
    """Contracts two axes of a kernel, the last one first."""

    cfg: config.DotGeneral

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.normal(), (8, 6, 5))
        return AqtDotGeneral(self.cfg)(x, kernel, (((2, 1), (1, 0)), ((), ())))


@pytest.mark.code("users")
def test_blocks_cut_the_axis_of_the_last_pair():
    weight = Tensor(numerics=INT8, blocks=Blocks(size=2))
    model = Unsorted(DotGeneral(fwd=DotGeneralRaw(rhs=weight)))
    serving = check_served(model, normal((4, 8, 6)))
    assert serving["aqt"]["kernel"]["rhs"].blocks == (2, 1, 1)
