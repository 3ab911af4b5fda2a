"""Configs, small data and the main comparison of the tests of aqtlite.flax."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from aqtlite import QTensor, config
from aqtlite.flax import AqtDotGeneral, FrozenKernel, convert
from tests.common import normal, quick_jit

INT8 = config.fully_quantized()
DG = AqtDotGeneral(INT8)
LAST_BY_FIRST = (((1,), (0,)), ((), ()))
X = normal((4, 8))
XX = normal((2, 4, 8))
NORMAL = nn.initializers.normal(0.3)


def init(model, *args, **kwargs):
    """Variables of a model: parameters of NumPy's, so that nothing is compiled.

    Kernels are normal, scales about one, biases from -1 to 1; other collections are
    what the model's own `init` makes.
    """

    def init_model():
        return model.init(jax.random.key(7), *args, **kwargs)

    def init_others():
        made = init_model()
        return {name: made[name] for name in made if name != "params"}

    variables = jax.eval_shape(init_model)
    if set(variables) - {"params", "aqt"}:
        variables = {**variables, **quick_jit(init_others)()}

    def fill(path, leaf):
        name = jax.tree_util.keystr(path)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(f"parameter {name} is {leaf.dtype}")
        if "bias" in name:
            values = np.linspace(-1, 1, leaf.size).reshape(leaf.shape)
        else:
            rng = np.random.default_rng(zlib.crc32(name.encode()))
            noise = rng.standard_normal(leaf.shape)
            values = 0.3 * noise if len(leaf.shape) > 1 else 1 + 0.1 * noise
        return jnp.asarray(values.astype(leaf.dtype), leaf.dtype)

    params = jax.tree_util.tree_map_with_path(fill, variables.get("params", {}))
    return {**variables, "params": params}


def apply(model, variables, *args, **kwargs):
    """`model.apply` under jit, arrays of any argument being traced."""
    return _apply(jax.jit, model, variables, args, kwargs)


def quick_apply(model, variables, *args, **kwargs):
    """`apply` in a program of `quick_jit`, where which weights are read is tested."""
    return _apply(quick_jit, model, variables, args, kwargs)


def _apply(jit, model, variables, args, kwargs):
    leaves, treedef = jax.tree.flatten((variables, args, kwargs))
    at = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]

    def run(values):
        filled = list(leaves)
        for i, value in zip(at, values, strict=True):
            filled[i] = value
        tree, args, kwargs = jax.tree.unflatten(treedef, filled)
        return model.apply(tree, *args, **kwargs)

    return jit(run)([leaves[i] for i in at])


def assert_equal(first, second):
    """Bit for bit, and not all zero or NaN."""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert not np.isnan(np.asarray(a, np.float32)).any()
    assert any(np.asarray(leaf).any() for leaf in jax.tree.leaves(first))


def placeholders(tree):
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, FrozenKernel))
    return [leaf for leaf in leaves if isinstance(leaf, FrozenKernel)]


def float_shapes(tree):
    """Shapes of the floats that are no part of a quantized array."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, QTensor))
    return [
        leaf.shape
        for leaf in leaves
        if not isinstance(leaf, QTensor) and jnp.issubdtype(leaf.dtype, jnp.floating)
    ]


def check_served(model, *args, frozen=None, variables=None, **kwargs):
    """Converts, serves, and compares with the trained model.

    Args:
        frozen: how many parameters have to be gone from "params".
    """
    variables = init(model, *args) if variables is None else variables
    serving = convert(model, variables, *args, **kwargs)
    assert_equal(
        apply(model, variables, *args, **kwargs),
        apply(model, serving, *args, **kwargs),
    )
    gone = placeholders(serving["params"])
    if frozen is not None:
        assert len(gone) == frozen, gone
    for kernel in gone:
        assert kernel.shape not in float_shapes(serving), kernel
    before, after = (
        len(jax.tree.leaves(tree["params"])) for tree in (variables, serving)
    )
    assert before == after  # Each frozen parameter has a marker.
    return serving
