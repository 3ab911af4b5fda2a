"""Each kind of dot of two arrays."""

from aqtlite import lowering


def contract(
    kind, lhs, rhs, dims, order=None, *, units=(None, None), largest=(None, None)
):
    """Contracts two arrays with the dimension numbers of `lax.dot_general`."""
    dot = lowering.Dot(dims, lhs.ndim, rhs.ndim, order)
    inputs = (
        lowering.DotInput(values, None, *static)
        for values, *static in zip((lhs, rhs), largest, units, strict=True)
    )
    return kind(dot, *inputs)


def integer_dot(lhs, rhs, dims, order=None, largest=(None, None)):
    return contract(lowering.Integers(), lhs, rhs, dims, order, largest=largest)


def mixed_dot(lhs, rhs, dims, order=None, *, out_dtype):
    return contract(lowering.Mixed(out_dtype), lhs, rhs, dims, order)
