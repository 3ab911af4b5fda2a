"""Serving programs, of every way in which a model is quantized."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import export

import aqtlite
from aqtlite import config
from aqtlite.flax import AqtDotGeneral, convert, quantize_model
from aqtlite.flax import nnx as aqt_nnx
from tests import common
from tests.flax.support import init

pytestmark = pytest.mark.code("quick")

CFG = config.fully_quantized()
X = common.normal((2, 8))


def injected():
    model = nn.Dense(4, dot_general=AqtDotGeneral(CFG))
    return model.apply, convert(model, init(model, X), X)


def by_rules():
    model = quantize_model(nn.Dense(4), CFG)
    return model.apply, convert(model, init(model, X), X)


def of_function():
    function = aqtlite.quantize_function(lambda w, x: x @ w, CFG, params=0)
    return aqtlite.convert_function(function, common.normal((8, 4)), X)


def of_nnx():
    model = aqt_nnx.quantize_model(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), CFG)
    structure, state = nnx.split(aqt_nnx.convert(model, X))
    return lambda state, x: nnx.merge(structure, state)(x), state


@pytest.mark.parametrize("way", [injected, by_rules, of_function, of_nnx])
def test_gives_what_the_jitted_function_gives(way):
    function, serving = way()
    program = aqtlite.compile_serving(function, serving, X)
    wanted = jax.jit(function)(serving, X)
    assert (program(X) == wanted).all()
    exported = program.export()
    assert (exported.call(tuple(jax.tree.leaves(serving)), X) == wanted).all()


@pytest.mark.parametrize("way", [injected, by_rules, of_function, of_nnx])
def test_converts_and_runs_where_jit_is_disabled(way):
    function, serving = way()
    wanted = jax.jit(function)(serving, X)
    with jax.disable_jit():
        function, again = way()
        common.assert_same(again, serving)
        assert (aqtlite.compile_serving(function, again, X)(X) == wanted).all()


def test_exported_program_is_read_back():
    function, serving = injected()
    program = aqtlite.compile_serving(
        function, serving, jax.ShapeDtypeStruct((2, 8), X.dtype)
    )
    data = program.export(["cpu", "cuda"]).serialize()
    leaves = tuple(jax.tree.leaves(serving))
    assert (jax.export.deserialize(data).call(leaves, X) == program(X)).all()


def test_donated_state_and_keyword_arguments():
    function, serving = injected()

    def step(serving, total, x, *, factor):
        return total + factor * function(serving, x).sum()

    start = jnp.float32(0)
    program = aqtlite.compile_serving(
        step, serving, start, X, donate_argnums=(1,), factor=2.0
    )
    wanted = 2 * function(serving, X).sum()
    total = program(program(jnp.float32(0), X, factor=1.0), X, factor=1.0)
    assert jnp.allclose(total, wanted)
    assert start.is_deleted() is False
    donated = jnp.float32(1)
    program(donated, X, factor=1.0)
    assert donated.is_deleted()


def test_other_shapes_are_refused():
    function, serving = injected()
    program = aqtlite.compile_serving(function, serving, X)
    with pytest.raises(TypeError, match="float32\\[3,8\\]") as caught:
        program(common.normal((3, 8)))
    (note,) = caught.value.__notes__
    compiled = jax.typeof(X).str_short()
    assert note.startswith(f"compile_serving compiled this program for ({compiled}):")


@pytest.mark.parametrize(
    ("platforms", "error", "message"),
    [
        ("cpu", TypeError, "platforms is a list of names, got 'cpu'"),
        (1, TypeError, "platforms is a list of names, got 1"),
        (["cpu", "banana"], ValueError, "no platform 'banana' is known.*'cpu', 'cuda'"),
        (["gpu"], ValueError, "no platform 'gpu' is known, only .*'cuda', 'rocm'"),
        ([None], ValueError, "no platform None is known"),
        ([], ValueError, "platforms is empty"),
    ],
)
def test_unknown_platforms_are_refused_at_once(platforms, error, message):
    program = aqtlite.compile_serving(lambda w, x: x @ w, jnp.ones((8, 8)), X)
    with pytest.raises(error, match=message):
        program.export(platforms)


def test_variables_are_arrays_and_not_donated():
    function, serving = injected()
    with pytest.raises(TypeError, match="got ShapeDtypeStruct among them"):
        shapes = jax.eval_shape(lambda one: one, serving)
        aqtlite.compile_serving(function, shapes, X)
    for numbers in (0, (0,), (1, -2)):
        with pytest.raises(ValueError, match="names the serving variables, argument 0"):
            aqtlite.compile_serving(function, serving, X, donate_argnums=numbers)
    for numbers in (2, (-3,)):
        with pytest.raises(ValueError, match="names -?[23], and there are 2 posit"):
            aqtlite.compile_serving(function, serving, X, donate_argnums=numbers)


@pytest.mark.parametrize("number", [1, -1])
def test_an_argument_is_donated_by_its_number(number):
    program = aqtlite.compile_serving(
        lambda w, x: x @ w, jnp.ones((8, 8)), X, donate_argnums=number
    )
    donated = X + 0
    program(donated)
    assert donated.is_deleted()
    assert not X.is_deleted()


def test_symbolic_shapes_are_refused():
    rows = jax.ShapeDtypeStruct(export.symbolic_shape("b, 8"), jnp.float32)
    with pytest.raises(ValueError, match="symbolic shape .b, 8.: compile for each"):
        aqtlite.compile_serving(lambda w, x: x @ w, jnp.ones((8, 8)), rows)


def int4(device=None):
    w = jax.device_put((4 * common.normal((8, 4))).astype(jnp.int4), device)
    return {"w": w, "scale": jax.device_put(jnp.full((1, 4), 0.25), device)}


def dequantized(serving, x):
    return x @ serving["w"].astype(jnp.float32) * serving["scale"]


def test_int4_weights_that_are_committed_to_a_device():
    # Those that a checkpoint is restored to. Compiled programs refuse them.
    device = jax.devices()[-1]
    serving, x = int4(device), jax.device_put(X, device)
    program = aqtlite.compile_serving(dequantized, serving, x)
    assert (program(x) == jax.jit(dequantized)(serving, x)).all()
    assert program(x).devices() == {device}


def test_int4_arguments_that_are_committed_to_a_device_are_refused():
    def function(x, serving):
        return dequantized(serving, x)

    program = aqtlite.compile_serving(function, X, int4())
    assert (program(int4()) == jax.jit(function)(X, int4())).all()
    with pytest.raises(ValueError, match=r"argument of int4\[8,4\] that is committed"):
        aqtlite.compile_serving(function, X, int4(jax.devices()[0]))


def test_a_call_that_is_traced_is_refused():
    def served(w, x):
        return aqtlite.compile_serving(lambda w, x: x @ w, w, X)(x)

    w = jnp.ones((8, 4))
    for traced in (jax.jit(served), jax.jit(lambda _, x: served(w, x))):
        with pytest.raises(ValueError, match="called in a function that JAX traces"):
            traced(w, X)
    with pytest.raises(ValueError, match="called in a function that JAX traces"):
        jax.vmap(served, (0, None))(w[None], X)


@pytest.mark.parametrize("transformation", [jax.jit, jax.vmap, jax.grad])
def test_a_program_is_not_transformed(transformation):
    program = aqtlite.compile_serving(lambda w, x: (x * w).sum(), jnp.ones(()), X)
    with pytest.raises(TypeError, match="Cannot apply JAX transformations"):
        transformation(program)(X)


def test_a_program_equals_itself_alone():
    first, second = (
        aqtlite.compile_serving(lambda w, x: x * w, jnp.ones(2), X[:, :2])
        for _ in range(2)
    )
    assert first == first and first != second and len({first, second}) == 2
