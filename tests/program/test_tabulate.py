"""Tables of variables."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import aqtlite
from aqtlite import calibration, config, numerics
from aqtlite import flax as aqt_flax
from aqtlite.flax import nnx as aqt_nnx

pytestmark = pytest.mark.code("quick")


def test_states_of_nnx_and_zero_points():
    changes = {
        "fwd.rhs.numerics": numerics.IntAffine(bits=8),
        "fwd.rhs.calibration": calibration.MinMax(),
    }
    cfg = config.update(config.qat(), changes)
    model = aqt_nnx.quantize_model(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), cfg)
    state = nnx.state(aqt_nnx.convert(model, jnp.ones((2, 4))))
    rows = aqtlite.tabulate(state).splitlines()
    frozen = next(row for row in rows if row.startswith("aqt/"))
    assert "uint8[3,4], scale float32[3,1], zero point " in frozen
    assert rows[-2].startswith("bias/value ") and rows[-2].endswith("12 bytes")


def test_partitioned_weights():
    kernel_init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    model = aqt_flax.quantize_model(
        nn.Dense(8, use_bias=False, kernel_init=kernel_init), config.weight_only(4)
    )
    x = jnp.ones((2, 64))
    serving = aqt_flax.convert(model, model.init(jax.random.key(0), x), x)
    _, row, _ = aqtlite.tabulate(serving).splitlines()
    assert re.split("  +", row)[1:] == ["int4[8,64], scale float32[8,1]", "288 bytes"]


def test_shapes_numbers_and_keys_have_sizes_too():
    tree = {
        "a": [jax.ShapeDtypeStruct((10, 100), "bfloat16")],
        "key": jax.random.key(0),
        "step": 3,
    }
    shown = aqtlite.tabulate(tree)
    rows = [row.split() for row in shown.splitlines()]
    assert rows[1] == ["a/0", "bfloat16[10,100]", "2.0", "kB"]
    assert rows[2][:2] == ["key", "key<fry>[]"]
    assert rows[3][:2] == ["step", "int64[]"]
    assert "<td>bfloat16[10,100]</td>" in shown._repr_html_()
    assert "0 arrays" in aqtlite.tabulate({})
