import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import compute_on
from jax.extend import core
from jax.sharding import Mesh, PartitionSpec

from aqtlite.jaxpr import analysis, equations, rewriting
from aqtlite.jaxpr.replacement import Replacement

pytestmark = pytest.mark.code("quick")

X = jnp.arange(6.0).reshape(3, 2)


@jax.custom_jvp
def _with_jvp(x):
    return jnp.sin(x)


_with_jvp.defjvp(lambda primals, tangents: (_with_jvp(*primals), tangents[0]))


@jax.custom_vjp
def _with_vjp(x):
    return jnp.sin(x)


_with_vjp.defvjp(lambda x: (jnp.sin(x), None), lambda _, g: (g,))


def _while(x):
    return lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1]) + 1), (0, x)
    )[1]


def _shard_map(x):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    spec = PartitionSpec("data")
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)(x)


def _compute_on(x):
    # Before JAX 0.12, `compute_on` was a context alone.
    place = getattr(compute_on, "compute_on2", compute_on.compute_on)
    return place(jnp.sin, compute_type="device_host", out_memory_spaces=DEVICE)(x)


DEVICE = jax.memory.Space.Device
FUNCTIONS = {
    "jit": jax.jit(lambda x: jnp.sin(x)),
    "remat2": jax.checkpoint(lambda x: jnp.sin(x)),
    "custom_jvp_call": _with_jvp,
    "custom_vjp_call": _with_vjp,
    "shard_map": _shard_map,
    "compute_on": _compute_on,
    "scan": lambda x: lax.scan(lambda c, y: (jnp.sin(c) + y, c), x[0], x)[1],
    "while": _while,
    "cond": lambda x: lax.cond(x[0, 0] < 1, jnp.sin, jnp.cos, x),
}


def _trace(name):
    """A function of one equation with bodies, and which of its equations that is."""
    closed = jax.make_jaxpr(FUNCTIONS[name])(X)
    names = [eqn.primitive.name for eqn in closed.jaxpr.eqns]
    return closed, names.index(name)


def _replaced_inside(closed, index):
    """Evaluates the function with a sine in its equation replaced by zeros."""
    eqn = closed.jaxpr.eqns[index]
    number, place = next(
        (number, place)
        for number, body in enumerate(equations.bodies(eqn))
        for place, inner in enumerate(body.jaxpr.eqns)
        if inner.primitive.name == "sin"
    )
    zeros = Replacement(
        lambda values, given: ([jnp.zeros_like(values[0])], given),
        per_step=(False,) * (eqn.primitive.name == "scan"),
    )
    location = ((index, number), (place, 0))
    (result,), _ = rewriting.evaluate(closed, [X], {location: zeros})
    return result


def _with_parameters(closed, index, **params):
    """The jaxpr, with other parameters of one of its equations."""
    eqns = list(closed.jaxpr.eqns)
    eqns[index] = eqns[index].replace(params=params)
    return core.ClosedJaxpr(closed.jaxpr.replace(eqns=eqns), closed.consts)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_equation_of_a_jax_that_is_not_known_is_an_error(name):
    closed, index = _trace(name)
    params = closed.jaxpr.eqns[index].params
    closed = _with_parameters(closed, index, **params, of_the_future=1)
    with pytest.raises(NotImplementedError) as error:
        _replaced_inside(closed, index)
    assert str(error.value) == (
        f"JAX {jax.__version__} has other parameters in its {name} equations than "
        "this version of aqtlite can read (unknown of_the_future): install JAX 0.10 "
        "to 0.12, or a newer aqtlite"
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_equation_is_built_anew(name):
    closed, index = _trace(name)
    got = _replaced_inside(closed, index)
    assert got.shape == X.shape
    assert not np.array_equal(got, FUNCTIONS[name](X))


def test_place_of_a_computation_is_kept():
    closed, index = _trace("compute_on")
    run = jax.jit(lambda: _replaced_inside(closed, index))
    assert '_xla_compute_type = "host"' in run.lower().as_text()


def test_analysis_of_an_unknown_scan_is_an_error():
    closed, index = _trace("scan")
    params = dict(closed.jaxpr.eqns[index].params)
    params["steps"] = params.pop("length")
    closed = _with_parameters(closed, index, **params)
    with pytest.raises(NotImplementedError, match="unknown steps; missing length"):
        analysis.output_dependencies(closed)


def test_inputs_and_outputs_of_a_scan():
    def function(constant, start, scanned):
        def step(carry, x):
            a, b = carry
            return (b * constant, a + x), (a, b, x + 1)

        return lax.scan(step, start, scanned, reverse=True, unroll=2)

    args = (X[0], (X[0], X[1]), X)
    closed = jax.make_jaxpr(function)(*args)
    (eqn,) = (e for e in closed.jaxpr.eqns if e.primitive.name == "scan")
    scan = equations.Scan.of(eqn)
    assert (scan.num_consts, scan.num_carry) == (1, 2)
    assert (scan.length, scan.reverse, scan.unroll) == (3, True, 2)
    assert scan.of_inputs("abcd") == (["a"], ["b", "c"], ["d"])
    assert scan.of_outputs("abcde") == (["a", "b"], ["c", "d", "e"])
