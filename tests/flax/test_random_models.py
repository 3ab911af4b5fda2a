"""A fixed sample of random models is served as it was trained.

``python -m tests.flax.served_equals_trained`` compares as many as are wanted.
"""

import inspect

import jax
import numpy as np
import pytest

from aqtlite import config
from aqtlite.lowering.forms import packed_dot, processor
from tests.flax import random_configs, random_models, served_equals_trained

# Most of these were once served with other last bits. There is one of each preset.
SEEDS = {
    "integers": (101,),
    "weight_only": (20,),
    "fake_quant": (7,),
    "dg_in_dtype": (8,),
    "presets": (1, 3, 5, 6, 8, 9, 10, 12, 16, 18, 27, 30, 40, 41, 59, 1246),
    "grids": (1056,),
    "rotated": (20,),
    "repeated": (1, 5),
}


@pytest.fixture(scope="module", autouse=True)
def memory():
    """Gives back the compiled programs, of which no other test has use."""
    yield
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "seed"), [(kind, seed) for kind, seeds in SEEDS.items() for seed in seeds]
)
def test_served_equals_trained(kind, seed):
    sample = random_models.sample(kind, seed)
    found = served_equals_trained.differences(sample, ("jit",))
    assert not found, "\n".join(str(one) for one in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "seed"),
    # In the first two, sums of floats would follow another layout of the output.
    [("integers", 7007), ("integers", 7024), ("weight_only", 9), ("grids", 15)],
)
def test_packed_weights_serve_what_was_trained(kind, seed, monkeypatch):
    monkeypatch.setattr(packed_dot, "_worthwhile", lambda rows: 0)
    monkeypatch.setattr(processor, "has_unsigned_dots", lambda: True)
    sample = random_models.sample(kind, seed)
    found = served_equals_trained.differences(sample, ("compiled",))
    assert not found, "\n".join(str(one) for one in found)


def test_every_preset_is_drawn():
    quantizing = set(config.__all__) & {
        name for name in dir(config) if inspect.isfunction(getattr(config, name))
    }
    others = {"describe", "differences", "from_json", "register", "to_json", "update"}
    others |= {"for_activations", "for_values"}
    others |= {"presets", "unquantized"}
    others |= {"gptq"}  # Rounds at conversion: it serves other integers than it trains.
    drawn = {*random_configs.PRESETS, "lsq_weight_only"}  # The last by "lsq".
    assert quantizing - others == drawn


def test_samples_are_repeatable():
    first, again, other = (random_models.sample("integers", s) for s in (0, 0, 1))
    assert first.model == again.model
    jax.tree.map(np.testing.assert_array_equal, first.variables, again.variables)
    np.testing.assert_array_equal(first.args[0], again.args[0])
    assert str(first) == str(again) != str(other)


def test_sample_models_have_numbers():
    """No output is all zeros or NaN, where a difference could not be seen."""
    sample = random_models.sample("integers", 0)
    out = np.asarray(sample.model.apply(sample.variables, *sample.args), np.float32)
    assert np.isfinite(out).all()
    assert out.any()
