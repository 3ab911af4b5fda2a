"""Reports on whole models agree with an independent reading of their programs."""

import collections
import importlib.util
import math
import pathlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import qwix
from aqt.jax.v2 import config as aqtp_config
from aqt.jax.v2.flax import aqt_flax
from flax import nnx

from aqtlite import report
from aqtlite.flax import quantize_model
from aqtlite_demo.model import Transformer
from tests.common import nearest
from tests.flax.test_public_layouts import ResNet

pytestmark = pytest.mark.code("quick")

IMAGES = jax.ShapeDtypeStruct((2, 4), "int32")
TOKENS = jax.ShapeDtypeStruct((2, 16), "int32")
ROWS = jax.ShapeDtypeStruct((16, 32), "float32")


def sums_in(text):
    """Multiply-accumulates of a program's text by the dtypes of its operands.

    Read line by line, and each instruction once: there are no loops in these programs.
    """
    shapes = {}
    for name, dtype, dims in re.findall(r"%?([\w.-]+) = (\w+)\[([\d,]*)\]", text):
        shapes[name] = dtype, [int(n) for n in dims.split(",") if n]
    found = collections.Counter()
    name = r"%?([\w.-]+)"
    pattern = rf"{name} = \w+\[[\d,]*\]\S* (dot|convolution)\({name}, {name}\)(.*)"
    for name, op, lhs, rhs, rest in re.findall(pattern, text):
        _, out = shapes[name]
        (left, lhs_shape), (right, rhs_shape) = shapes[lhs], shapes[rhs]
        if op == "dot":
            axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)[1]
            summed = math.prod(lhs_shape[int(i)] for i in axes.split(",") if i)
        else:
            labels = re.search(r"dim_labels=\w+_(\w+)->", rest)[1]
            summed = math.prod(rhs_shape) // rhs_shape[labels.index("o")]
            zeros = re.search(r"lhs_dilate=([\dx]+)", rest)
            summed //= math.prod(map(int, zeros[1].split("x"))) if zeros else 1
        # Of two int8, VNNI offsets one to uint8.
        both = ("s8", "s8") if {left, right} == {"u8", "s8"} else (left, right)
        found[both] += math.prod(out) * summed
    # A kernel of this library: int8 weights, and rows of int8, which may be columns.
    pattern = r"%?([\w.-]+) = .* custom-call\(\S+, %?([\w.-]+)\).*aqtlite_panels_8_1_"
    for out, rows in re.findall(pattern, text):
        found["s8", "s8"] += shapes[out][1][-1] * math.prod(shapes[rows][1])
    return found


def shortened(dtype):
    """A report's name of dtypes, as programs write them."""
    names = {"int": "s", "uint": "u", "float": "f", "bfloat": "bf"}
    both = dtype.split(" x ") * 2
    return tuple(
        re.sub(r"[a-z]+", lambda one: names[one[0]], name) for name in both[:2]
    )


def experts():
    path = pathlib.Path(__file__).parents[2] / "examples/mixture_of_experts.py"
    spec = importlib.util.spec_from_file_location("mixture_of_experts", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Experts(4, 24, nearest())


class Layers(nn.Module):
    """Two layers with a given `dot_general`."""

    dot_general: object

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(24, dot_general=self.dot_general, name="up")(x))
        return nn.Dense(8, dot_general=self.dot_general, name="down")(x)


class NnxLayers(nnx.Module):
    """The same in NNX."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(32, 24, rngs=rngs), nnx.Linear(24, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def of_qwix():
    rule = qwix.QtRule(module_path=".*", weight_qtype="int8", act_qtype="int8")
    sample = jnp.ones(ROWS.shape)
    return qwix.quantize_model(NnxLayers(nnx.Rngs(0)), qwix.QtProvider([rule]), sample)


def of_aqt():
    cfg = aqtp_config.fully_quantized(use_stochastic_rounding=False)
    return Layers(aqt_flax.AqtDotGeneral(cfg))


MODELS = {
    "demo": (lambda: Transformer(1, 16, 2, 16, cfg=nearest()), TOKENS, (9, 18), 1),
    "resnet": (lambda: quantize_model(ResNet(), nearest()), IMAGES, (4, 6), 1),
    "experts": (experts, ROWS, (3, 4), 0.9),
    "qwix": (of_qwix, ROWS, (2, 4), 1 / 3),
    "aqt": (of_aqt, ROWS, (2, 4), 1),
}
"""For each model: its argument, its forward contractions and those of its gradient, of
which first layers have one, and the least share of its work in 8 bits."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model(name):
    make, x, layers, share = MODELS[name]
    model = make()
    if isinstance(model, nnx.Module):
        graph, given, rest = nnx.split(model, nnx.Param, ...)

        def apply(given, rest, x):
            return nnx.merge(graph, given, rest)(x)

    else:
        init = getattr(model, "init", None) or model.model.init
        rest = dict(jax.eval_shape(init, jax.random.key(0), x))
        given = rest.pop("params")
        rngs = {"params": jax.random.key(0)} if name == "aqt" else None

        def apply(given, rest, x):
            # AQT's layers ask for a key even where nothing is random.
            return model.apply({"params": given, **rest}, x, rngs=rngs)

    fn = jax.jit(jax.grad(lambda *args: jnp.sum(apply(*args) ** 2)))
    found = report(fn, given, rest, x, params=0)
    counted = collections.Counter()
    for one in found.contractions:
        for dtype, part in one.in_dtypes.items():
            counted[shortened(dtype)] += round(part * one.compiled_macs)
    for one in found.others:
        counted[shortened(one.dtype)] += one.macs
    assert +counted == +sums_in(fn.lower(given, rest, x).compile().as_text())
    roles = collections.Counter(one.role for one in found.contractions)
    assert (roles["forward"], roles["gradient"]) == layers
    narrow = sum(part for x, part in found.shares.items() if "float" not in x)
    assert narrow >= share - 1e-9
