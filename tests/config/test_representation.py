import dataclasses

import pytest
from hypothesis import given, settings

from aqtlite import config, numerics
from aqtlite.config import representation
from aqtlite.config.json import registry
from tests.config import strategies

pytestmark = pytest.mark.code("quick")

NAMES = {name: registry.find(name) for name in registry.names()}


@settings(max_examples=20, deadline=None)
@given(strategies.dot_generals())
def test_repr_evaluates_back(cfg):
    assert eval(repr(cfg), NAMES) == cfg


def test_repr_fits_a_screen():
    lines = repr(config.fully_quantized()).splitlines()
    assert len(lines) < 32
    assert max(map(len, lines)) <= 80


def test_repr_omits_defaults():
    assert repr(config.unquantized()) == "DotGeneral()"
    assert repr(config.Tensor(numerics=numerics.IntSymmetric(bits=3))) == (
        "Tensor(numerics=IntSymmetric(bits=3))"
    )


def test_repr_shows_a_dtype_that_numpy_takes_for_none():
    raw = config.DotGeneralRaw(dg_in_dtype="float64")
    assert repr(raw) == "DotGeneralRaw(dg_in_dtype='float64')"


@dataclasses.dataclass(frozen=True)
class _Derived:
    a: int
    b: int | None = None

    def __post_init__(self):
        if self.b is None:
            object.__setattr__(self, "b", self.a + 1)


def test_constructor_arguments_leave_derived_fields_at_their_default():
    assert representation.constructor_arguments(_Derived(1)) == {"a": 1, "b": None}
    assert representation.constructor_arguments(_Derived(1, 5)) == {"a": 1, "b": 5}
    assert representation.non_default_arguments(_Derived(1)) == {"a": 1}
