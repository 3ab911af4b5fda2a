"""Float32 results that compilers keep as they are.

LLVM contracts ``a * b + c`` to a fused multiply-add where product and sum meet in one
loop, which depends on all else that the loop computes, and on the processor. XLA
rewrites ``(a * 2.5) * 0.5`` or ``1 / sqrt(a)`` where it sees how a value was made. Both
stop at a value that met a zero of which they know nothing: in an exclusive or, which
costs one integer operation, or in a sum with a product, which costs nothing where it
is contracted. Both fuse.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.typing import ArrayLike


def barrier(x: jax.Array) -> jax.Array:
    """Returns `x`, float32, as a value of which a compiler does not know the origin.

    Without a derivative: for forms of `TargetDependent` functions.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(lax.bitwise_xor(bits, _zero()), jnp.float32)


def mul(x: ArrayLike, y: ArrayLike) -> jax.Array:
    """Returns ``x * y``, float32, rounded before anything is added to it.

    Adding -0.0 changes no value, nor does a fused multiply-add of it: it rounds the
    exact product. So compilers may contract this sum, and then find no product to
    contract into the next one.

    Without a derivative, as `barrier`.
    """
    sign = lax.bitwise_or(_zero(), np.uint32(0x80000000))
    return lax.add(lax.mul(x, y), lax.bitcast_convert_type(sign, jnp.float32))


def _zero() -> jax.Array:
    return lax.shift_right_logical(_replica_p.bind(), np.uint32(31))


# The number of the replica that runs a program: below 2^31, and known at run time only.
_replica_p = Primitive("replica")


@_replica_p.def_abstract_eval
def _type_of_replica():
    return ShapedArray((), np.dtype("uint32"))


@_replica_p.def_impl
def _first_replica():
    return np.uint32(0)


def _lower_replica(context):
    del context
    number = ir.RankedTensorType.get((), ir.IntegerType.get_unsigned(32))
    made = ir.Operation.create("stablehlo.replica_id", results=[number], operands=[])
    return [made.result]


mlir.register_lowering(_replica_p, _lower_replica)
