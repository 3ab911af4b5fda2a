"""Float32 results that compilers keep as they are.

LLVM contracts ``a * b + c`` to a fused multiply-add where product and sum meet in one
loop, which depends on all else that the loop computes, and on the processor. XLA
rewrites ``(a * 2.5) * 0.5`` or ``1 / sqrt(a)`` where it sees how a value was made. Both
stop at a value that went through an exclusive or with a zero of which they know
nothing: a barrier that costs one integer operation, and fuses.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir


def barrier(x: jax.Array) -> jax.Array:
    """Returns `x`, float32, as a value of which a compiler does not know the origin.

    Without a derivative: for forms of `TargetDependent` functions.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    zero = lax.shift_right_logical(_replica_p.bind(), np.uint32(31))
    return lax.bitcast_convert_type(lax.bitwise_xor(bits, zero), jnp.float32)


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
