"""The table of operators and their forms in ONNX."""

from aqtlite.edge.onnx.forms import contractions, elementwise, images, moves
from aqtlite.edge.onnx.forms.base import Call, Form, clipped
from aqtlite.edge.onnx.writer import Array, NotWritable
from aqtlite.edge.operators.activation import Activated
from aqtlite.edge.operators.base import Operator

FORMS: dict[type[Operator], Form] = {
    **elementwise.FORMS,
    **images.FORMS,
    **moves.FORMS,
    **contractions.FORMS,
}
"""The form of each operator."""


def write(call: Call, operator: Operator) -> Array:
    """Adds an operator to a graph; returns the output.

    Raises:
        NotWritable: if ONNX has no form of it.
    """
    form = FORMS.get(type(operator))
    if form is None:
        raise NotWritable("there is no form of it in ONNX")
    made = form(call, operator)
    if isinstance(operator, Activated):
        return clipped(call, made, *operator.clamp)
    return made
