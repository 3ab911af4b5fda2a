"""Equations that multiply floats, or may, and that rules do not quantize."""

import functools
import sys
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from aqtlite.jaxpr import equations, registry

_PRODUCTS = frozenset(
    {
        "bcoo_dot_general",
        "bcoo_dot_general_sampled",
        "bcoo_spdot_general",
        "bcsr_dot_general",
        "coo_matmat",
        "coo_matvec",
        "coo_spmm",
        "coo_spmv",
        "csr_matmat",
        "csr_matvec",
        "csr_spmm",
        "csr_spmv",
        "cudnn_fusion",
        "dot_product_attention_bwd_wrapper",
        "dot_product_attention_fp8_bwd_wrapper",
        "dot_product_attention_fp8_fwd_wrapper",
        "dot_product_attention_fwd_wrapper",
        "scaled_dot",
        "scaled_matmul",
        "scaled_matmul_wrapper",
        "symmetric_product",
    }
)
_UNSEEN = frozenset({"call_exported", "ffi_call", "io_callback", "pure_callback"})


def why(eqn: Any) -> str | None:
    """Returns why rules do not quantize what an equation computes.

    None for all that multiplies no floats, and for contractions that rules know.
    """
    name = eqn.primitive.name
    floats = (any(map(_is_floating, atoms)) for atoms in (eqn.invars, eqn.outvars))
    if not all(floats) or registry.name_of(eqn) is not None:
        return None
    if name in _PRODUCTS:
        return f"lax.dot_general and others are quantized, but not {name}"
    if name in _UNSEEN:
        return f"rules cannot see what {name} calls"
    if not _is_known(eqn.primitive):
        return (
            f"rules cannot see into {name}, which is none of JAX's operations: "
            "aqtlite.register_operation says what it computes"
        )
    return None


def names_in(closed: core.ClosedJaxpr) -> set[str]:
    """Returns the names of the primitives of such equations, bodies included."""
    eqns = equations.with_bodies(closed)
    return {str(eqn.primitive.name) for eqn in eqns if why(eqn) is not None}


def _is_floating(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


@functools.cache
def _is_known(primitive: Any) -> bool:
    """Whether a primitive is of JAX or of this library, in one of its modules."""
    modules = [
        module
        for name, module in sys.modules.items()
        if name.partition(".")[0] in {"aqtlite", "jax"}
    ]
    return any(primitive is one for module in modules for one in vars(module).values())
