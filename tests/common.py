"""Data, small configs and quick compilation that several test files share."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import aqtlite
from aqtlite import config, numerics

MATMUL = (((1,), (0,)), ((), ()))

# With these a program is compiled in a quarter of the time, to slower code whose last
# bits are not those that users get: for what is compared within a tolerance.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,  # One module for LLVM, not several.
}
if jax.__version_info__ < (0, 11):  # The others have no such option.
    QUICK["xla_cpu_use_fusion_emitters"] = False
QUICK_FLAGS = " ".join(f"--{name}={int(value)}" for name, value in QUICK.items())
quick_jit = functools.partial(jax.jit, compiler_options=QUICK)

# One case per way in which dimension numbers can be laid out: shapes of lhs and rhs,
# then the dimension numbers.
DIMENSION_NUMBERS = {
    "one_row": ((1, 8), (8, 3), MATMUL),
    "odd_sizes": ((5, 7), (7, 9), MATMUL),
    "contracting_axis_first_and_last": ((8, 5), (3, 8), (((0,), (1,)), ((), ()))),
    "batch_leading": ((2, 5, 7), (2, 7, 3), (((2,), (1,)), ((0,), (0,)))),
    "batch_in_the_middle": ((5, 2, 7), (7, 3, 2), (((2,), (0,)), ((1,), (2,)))),
    "two_batch_axes_crossed": (
        (2, 3, 5, 7),
        (7, 3, 4, 2),
        (((3,), (0,)), ((0, 1), (3, 1))),
    ),
    "two_contracting_axes_crossed": (
        (3, 5, 7),
        (7, 4, 3),
        (((2, 0), (0, 2)), ((), ())),
    ),
    "batch_and_two_contracting": (
        (3, 2, 5, 7),
        (7, 2, 4, 3),
        (((3, 0), (0, 3)), ((1,), (1,))),
    ),
    "nothing_contracted": ((4,), (5,), (((), ()), ((), ()))),
    "batch_only": ((4, 3), (4, 5), (((), ()), ((0,), (0,)))),
    "scalar_output": ((7,), (7,), (((0,), (0,)), ((), ()))),
}


def mostly_slow(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Cases of a test, or their names, all but `quick` marked slow.

    For models, presets and grids of many kinds, where the first, the middle and the
    last of all, which ``python -m tests`` would run, are not those that say most.
    """
    every, slow = list(cases), pytest.mark.slow
    assert set(quick) < set(every)
    return [one if one in quick else pytest.param(one, marks=slow) for one in every]


def normal(shape: tuple[int, ...], seed: int = 0, dtype: Any = jnp.float32):
    """Gaussian data that is the same in every run."""
    rng = np.random.default_rng([seed, *shape])
    # Cast by NumPy, and put on the device as it is: `jnp.asarray` without a dtype
    # compiles a program for every shape.
    values = rng.standard_normal(shape).astype(np.float32)
    return jax.device_put(values.astype(jnp.dtype(dtype)))


def operands(case: str, dtype: Any = jnp.float32):
    """lhs, rhs and dimension numbers of one of `DIMENSION_NUMBERS`."""
    lhs_shape, rhs_shape, dims = DIMENSION_NUMBERS[case]
    return normal(lhs_shape, 1, dtype), normal(rhs_shape, 2, dtype), dims


def tensor(bits: int | None, *, grid: dict[str, Any] | None = None, **fields: Any):
    """The config of an operand: `bits` None leaves it in floating point."""
    if bits is None:
        return config.Tensor(**fields)
    return config.Tensor(
        numerics=numerics.IntSymmetric(bits=bits, **(grid or {})), **fields
    )


def nearest(bits: int = 8, **kwargs: Any) -> config.DotGeneral:
    """The preset `fully_quantized` without stochastic rounding."""
    return config.fully_quantized(
        fwd_bits=bits, bwd_bits=bits, use_stochastic_rounding=False, **kwargs
    )


def value_and_gradients(dot, lhs, rhs, dims, cotangent=None, **kwargs):
    """Output and both gradients of `dot`, for a fixed cotangent."""
    out, vjp = jax.vjp(lambda lhs, rhs: dot(lhs, rhs, dims, **kwargs), lhs, rhs)
    if cotangent is None:
        cotangent = normal(out.shape, 3, out.dtype)
    return out, *vjp(cotangent)


def relative_error(got, wanted) -> float:
    """Largest difference over largest magnitude."""
    got, wanted = (np.asarray(x, np.float64) for x in (got, wanted))
    assert got.shape == wanted.shape
    if not wanted.size:
        return 0.0
    return float(np.max(np.abs(got - wanted)) / np.max(np.abs(wanted)))


def rms_error(got, wanted) -> float:
    """Root mean square of the difference over that of `wanted`."""
    got, wanted = (np.asarray(x, np.float64) for x in (got, wanted))
    return float(np.sqrt(np.mean((got - wanted) ** 2) / np.mean(wanted**2)))


def shapes_of(tree: Any) -> Any:
    """The tree with a `jax.ShapeDtypeStruct` in place of each array."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def assert_same(got, wanted):
    """Equal trees of equal arrays, dtypes included."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def left_in_float(params: Any) -> list[Any]:
    """The leaves of serving parameters that were not frozen."""
    leaves = jax.tree.leaves(params, is_leaf=aqtlite.is_frozen)
    return [leaf for leaf in leaves if not aqtlite.is_frozen(leaf)]


def inside_shard_map(function: Callable[..., Any], *args: Any) -> Any:
    """Results of a function inside `jax.shard_map`, where its arguments vary."""

    def vary(x: jax.Array) -> jax.Array:
        varies = "d" in jax.typeof(x).manual_axis_type.varying
        return x if varies else lax.pcast(x, "d", to="varying")

    def run(args):
        out = function(*jax.tree.map(vary, args))
        return jax.tree.map(lambda x: vary(x)[None], out)

    mapped = jax.shard_map(
        run, mesh=jax.make_mesh((1,), "d"), in_specs=P(), out_specs=P("d")
    )
    return jax.tree.map(lambda x: x[0], mapped(args))


def check_refused(frozen):
    """Checks that what is read from a frozen parameter says that it is frozen."""
    for read in (
        lambda w: w.T,
        lambda w: w.astype(jnp.float32),
        lambda w: w.reshape(-1),
        lambda w: w.at[0].set(0),
        lambda w: w[0],
        lambda w: w**2,
        lambda w: 2 * w,
        lambda w: 2**w,
        lambda w: w < 1,
        lambda w: -w,
        lambda w: jnp.ones(w.shape[0]) @ w,
        jnp.sum,
        np.asarray,
        np.array,
    ):
        with pytest.raises((TypeError, AttributeError), match="is frozen"):
            read(frozen)
    assert not hasattr(frozen, "no_such_attribute")
