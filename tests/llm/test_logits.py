"""Logits of decoders, against those of the model's own package from the same file."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aqtlite import llm

pytestmark = pytest.mark.code("quick")

FOLDER = pathlib.Path(__file__).parent / "written_by_transformers"
FAMILIES = sorted(path.parent.name for path in FOLDER.glob("*/logits.npz"))


@nnx.jit
def logits_of(decoder, tokens, start=0):
    return decoder(tokens, start)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family):
    wanted = np.load(FOLDER / family / "logits.npz")
    decoder = llm.load(FOLDER / family).decoder
    got = logits_of(decoder, jnp.asarray(wanted["tokens"]))
    largest = np.abs(wanted["logits"]).max()
    np.testing.assert_allclose(got, wanted["logits"], rtol=0, atol=1e-4 * largest)
