"""Equations that the converter alone would compute otherwise, or refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from aqtlite import edge
from tests.edge import models

pytestmark = pytest.mark.code("quick")

FLOATS = np.array([-3.5, 2.5, -0.3, 0.5, 0, np.inf, -np.inf, np.nan], np.float32)
INTEGERS = np.array([-7, 7, -3, 0, 5, -(2**31)], np.int32)
OF_FLOATS = {
    "a remainder": lambda x: lax.rem(x, 2.0),
    "by less than zero": lambda x: lax.rem(x, -2.0),
    "fmod": lambda x: jnp.fmod(x, 0.7),
    "a floor modulo": lambda x: x % -2.0,
    "a floor division": lambda x: x // 2.0,
    "a cube root": jnp.cbrt,
    "away from zero": lax.round,
    "to even": jnp.round,
    "isinf": jnp.isinf,
    "isposinf": jnp.isposinf,
    "not infinite": lambda x: x != -jnp.inf,
    "some are infinite": lambda x: x == np.array([2.5, np.inf] * 4, np.float32),
    "infinite on the left": lambda x: jnp.inf == x,
    "no number is infinite": lambda x: jnp.nan_to_num(x, posinf=9.0, neginf=-9.0),
}
OF_INTEGERS = {
    "a remainder": lambda x: lax.rem(x, 3),
    "of computed ones": lambda x: lax.rem(x, 2 + x * x),
    "a floor modulo": lambda x: x % -3,
    "a logical shift": lambda x: lax.shift_right_logical(x, 1),
    "equality": lambda x: x == 7,
}


@pytest.mark.parametrize(
    ("functions", "x"), [(OF_FLOATS, FLOATS), (OF_INTEGERS, INTEGERS)]
)
def test_a_file_computes_what_jax_does(functions, x, tmp_path):
    def results(_, x):
        return [function(x) for function in functions.values()]

    path = tmp_path / "equations.tflite"
    edge.export(results, {}, None, x, path)
    found, expected = models.run(path, x), jax.jit(results)({}, x)
    for name, one, other in zip(functions, found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, err_msg=name)


def test_beside_operators_of_integers(tmp_path):
    def function(w, x):
        return jnp.fmod(x @ w, 0.5) @ w.T

    w, x = models.normal((4, 8)), models.normal((5, 4), 1)
    rules = [edge.Rule(op="rem", is_float=True)]
    models.assert_simulated(tmp_path / "equation.tflite", function, w, x, rules)
