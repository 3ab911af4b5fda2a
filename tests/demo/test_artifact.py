"""Saving for serving, and restoring."""

import functools

import jax
import numpy as np
import pytest

from aqtlite import config
from aqtlite_demo import artifact
from aqtlite_demo.model import Transformer
from tests.flax.support import init

pytestmark = [pytest.mark.slow, pytest.mark.code("quick")]

WIDTH = 32
INT8 = config.fully_quantized(fwd_bits=8, bwd_bits=8)
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 8), np.int32)


@functools.cache
def made(cfg):
    """A model, its variables, and those that serve."""
    model = Transformer(layers=1, width=WIDTH, heads=2, length=8, cfg=cfg)
    variables = init(model, TOKENS)
    return model, variables, artifact.serving_variables(model, variables)


@pytest.mark.parametrize("cfg", [None, INT8])
def test_restores_what_was_saved(cfg, tmp_path):
    model, variables, serving = made(cfg)
    artifact.save(tmp_path, model, serving)
    restored_model, restored = artifact.load(tmp_path)
    assert restored_model == model
    assert jax.tree.structure(restored) == jax.tree.structure(serving)
    for saved, loaded in zip(
        jax.tree.leaves(serving), jax.tree.leaves(restored), strict=True
    ):
        assert saved.dtype == loaded.dtype
        np.testing.assert_array_equal(saved, loaded)
    apply = jax.jit(model.apply)
    np.testing.assert_array_equal(apply(restored, TOKENS), apply(variables, TOKENS))


def test_a_quantized_artifact_holds_no_float_kernel():
    _, _, serving = made(INT8)
    kernels = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(serving)
        if "kernel" in jax.tree_util.keystr(path) and leaf.dtype == np.float32
    }
    # Scales may be kept under a kernel's name; a matrix may not.
    assert all(leaf.size < WIDTH * WIDTH for leaf in kernels.values()), kernels
    assert any(leaf.dtype == np.int8 for leaf in jax.tree.leaves(serving))


def test_a_float_artifact_replaces_a_quantized_one(tmp_path):
    sizes = {}
    for cfg in (INT8, None):
        model, _, serving = made(cfg)
        artifact.save(tmp_path, model, serving)
        assert artifact.load(tmp_path)[0] == model
        sizes[cfg] = artifact.checkpoint_bytes(tmp_path)
    assert sizes[INT8] < sizes[None]
