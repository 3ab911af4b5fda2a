"""The table of operators and their forms in ONNX."""

from collections.abc import Sequence

from aqtlite.edge.onnx.forms import elementwise, images, moves, products
from aqtlite.edge.onnx.forms.base import Form, Output, clipped
from aqtlite.edge.onnx.writer import Array, NotWritable, Writer
from aqtlite.edge.operators import activation as activations
from aqtlite.edge.operators.activation import Activation
from aqtlite.edge.operators.base import Operator

FORMS: dict[type[Operator], Form] = {
    **elementwise.FORMS,
    **images.FORMS,
    **moves.FORMS,
    **products.FORMS,
}
"""The form of each operator."""


def write(
    writer: Writer, operator: Operator, inputs: Sequence[Array], output: Output
) -> Array:
    """Adds an operator to a graph.

    Raises:
        NotWritable: if ONNX has no form of it.
    """
    form = FORMS.get(type(operator))
    if form is None:
        raise NotWritable("there is no form of it in ONNX")
    made = form(writer, operator, inputs, output)
    kind: Activation = getattr(operator, "activation", "none")
    low, high = activations.limits(kind)
    return clipped(writer, made, low, high, output)
