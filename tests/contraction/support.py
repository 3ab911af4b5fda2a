"""Operands of contractions."""

from tests import common


def operands(layout, dtype):
    """Returns random operands, and the dimension numbers.

    Args:
        layout: the shapes of both operands, and the dimension numbers.
        dtype: dtype of the operands.
    """
    *shapes, dims = layout
    x, w = (common.normal(shape, i).astype(dtype) for i, shape in enumerate(shapes))
    return x, w, dims
