"""The einsum equations of transformers in public models, quantized.

One program for each family: with the values and both gradients in float, quantized, and
with a config on one side alone.
"""

import functools
import re

import jax
import numpy as np
import pytest

import aqtlite
from aqtlite import numerics
from aqtlite.config import DotGeneral, DotGeneralRaw, Tensor
from tests.common import mostly_slow, nearest, normal, rms_error

pytestmark = pytest.mark.code("quick")

# Families of equations, with who writes them so. Sizes are those of `SIZES`.
EQUATIONS = {
    "attention": [
        "bqhd,bkhd->bhqk",  # Flax, T5X, EasyLM
        "bhqk,bkhd->bqhd",
        "btnh,bsnh->btns",  # gemma
        "btns,bsnh->btnh",
        "bnth,bnsh->bnts",  # heads first, as in many kernels
    ],
    "grouped and multi-query attention": [
        "btkgd,bskd->bkgts",  # MaxText
        "bkgts,bskd->btkgd",
        "bkgtd,bksd->bkgts",  # MaxText, another compute_axis_order
        "btkgh,bskh->btkgs",  # gemma
        "btkgs,bskh->btkgh",
        "btnd,bsd->bnts",  # one head of keys and values
        "bnts,bsd->btnd",
    ],
    "projections": [
        "btm,mnh->btnh",  # gemma's and T5X's layouts of query, key and value
        "btm,nmh->btnh",
        "bsm,ckmh->cbskh",  # gemma's key and value in one
        "btnh,nhm->btm",
        "btm,cfm->cbtf",  # gemma's gate and up-projection, transposed
        "btm,vm->btv",  # tied logits
    ],
    "latent attention": [  # DeepSeek-V2 and -V3, with the up-projections absorbed
        "bshd,hdc->bshc",
        "bshc,btc->bsht",
        "bshr,btr->bsht",
        "bsht,btc->bshc",
        "bshc,hdc->bshd",
    ],
    "low rank": [
        "btm,mr->btr",  # LoRA
        "btm,bmr->btr",  # an adapter for each row of the batch
        "btm,tk->bkm",  # Linformer: keys projected along the sequence
        "btm,ts->bsm",  # gMLP, MLP-Mixer
    ],
    "experts": [
        "gsec,gsm->egcm",  # GShard, Switch, T5X: dispatch
        "egcm,emf->egcf",
        "egcf,efm->gecm",
        "gsec,gecm->gsm",
        "bsm,bsec->ebcm",  # MaxText: dispatch, with the tokens first
        "ebcm,bsec->bsm",
        "bsm,emf->bsef",  # MaxText: all experts
        "bsef,efm->bsem",
        "bsem,bse->bsm",
        "gsm,me->gse",  # the router
    ],
    "relative positions": [
        "bhqd,qkd->bhqk",  # Shaw et al.: keys and values of positions
        "bhqk,qkd->bhqd",
        "bqhd,khd->bhqk",  # Transformer-XL
        "hn,nqk->hqk",  # T5's buckets as one-hot
    ],
    "linear attention and state spaces": [
        "bthm,bthd->bhmd",  # keys by values, summed over the sequence
        "bthm,bhmd->bthd",
        "bclhn,bcshn->bchls",  # Mamba-2, in chunks
        "bchls,bcshd->bclhd",
    ],
    "pairs of residues": [  # AlphaFold: outer product mean, triangles, biases
        "sic,sjd->ijcd",
        "ikc,jkc->ijc",
        "kjc,kic->ijc",
        "qkc,ch->hqk",
    ],
}
SIZES = dict(zip("bBgstqkijlh", (2, 2, 2, 6, 5, 5, 3, 4, 5, 6, 2), strict=True))
SIZES |= dict(zip("nmdcefrvo", (3, 8, 6, 4, 3, 7, 2, 9, 3), strict=True))

INT4 = Tensor(numerics=numerics.IntSymmetric(bits=4), use_fake_quant=True)
ONE_SIDED = DotGeneral(fwd=DotGeneralRaw(lhs=INT4), drhs=DotGeneralRaw(lhs=INT4))
_QUICKLY_COMPILED = {"xla_backend_optimization_level": 0}
each_family = pytest.mark.parametrize(
    "family", mostly_slow(EQUATIONS, "projections", "experts")
)


def operands(eqn):
    """Both operands, and the gradient of the result."""
    letters = re.findall(r"\w+", eqn)
    shapes = (tuple(SIZES[one] for one in term) for term in letters)
    return [normal(shape, seed) for seed, shape in enumerate(shapes)]


def value_and_gradients(eqn, cfg, lhs, rhs, g):
    function = functools.partial(aqtlite.einsum, eqn, cfg=cfg)
    out, vjp = jax.vjp(function, lhs, rhs)
    return out, *vjp(g)


def along(eqn, side):
    """The contracting axes of an operand."""
    lhs, rhs, out = re.findall(r"\w+", eqn)
    own, other = (lhs, rhs) if side == "lhs" else (rhs, lhs)
    return [i for i, one in enumerate(own) if one in other and one not in out]


def in_float(eqn, lhs, rhs, g):
    """What `value_and_gradients` gives: every letter is in two of the three terms."""
    a, b, out = re.findall(r"\w+", eqn)
    return (
        np.einsum(eqn, lhs, rhs),
        np.einsum(f"{out},{b}->{a}", g, rhs),
        np.einsum(f"{out},{a}->{b}", g, lhs),
    )


@each_family
def test_values_and_gradients(family):
    equations = {eqn: operands(eqn) for eqn in EQUATIONS[family]}

    @functools.partial(jax.jit, compiler_options=_QUICKLY_COMPILED)
    def run(equations):
        return {
            eqn: (
                value_and_gradients(eqn, nearest(), *arrays),
                value_and_gradients(eqn, ONE_SIDED, *arrays),
                aqtlite.quantize(arrays[0], INT4, along(eqn, "lhs")).dequant(),
            )
            for eqn, arrays in equations.items()
        }

    for eqn, (quantized, one_sided, rounded) in run(equations).items():
        lhs, rhs, g = equations[eqn]
        wanted = in_float(eqn, lhs, rhs, g)
        for got, one in zip(quantized, wanted, strict=True):
            assert rms_error(got, one) < 0.03, eqn
        # A config of lhs is that of the equation's first operand.
        assert rms_error(one_sided[0], np.einsum(eqn, rounded, rhs)) < 1e-5, eqn
        assert rms_error(one_sided[0], wanted[0]) > 0.02, eqn
        # One of drhs is of the gradient of the second, and not of the first.
        assert rms_error(one_sided[1], wanted[1]) < 1e-5, eqn
        assert rms_error(one_sided[2], wanted[2]) > 0.02, eqn


def sums_nothing(eqn):
    """The number of gradients whose result has all letters."""
    terms = re.findall(r"\w+", eqn)
    return sum(set(one) == set("".join(terms)) for one in terms[:2])


@each_family
def test_all_three_contract_integers(family):
    for eqn in EQUATIONS[family]:
        step = functools.partial(value_and_gradients, eqn, nearest())
        text = jax.jit(step).lower(*operands(eqn)).as_text()
        results = re.findall(r"stablehlo\.dot_general.*-> tensor<.*x(\w+)>", text)
        # Gradients that sum nothing are products of floats.
        products = sums_nothing(eqn)
        assert sorted(results) == ["f32"] * products + ["i32"] * (3 - products), eqn
