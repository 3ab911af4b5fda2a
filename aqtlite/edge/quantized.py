"""Programs of models that quantize contractions themselves, converted for serving.

Contractions are recorded in float, each with its frozen weight: the file gets the
integers that serve in JAX.
"""

from collections.abc import Sequence
from typing import Any

import jax
from absl import logging
from jax.extend import core

from aqtlite import config
from aqtlite.contraction import contract
from aqtlite.edge import importing
from aqtlite.edge.graph import Builder, Graph
from aqtlite.edge.operators.weights import QuantizedOperand
from aqtlite.jaxpr import tracing
from aqtlite.operations import Operation, Side
from aqtlite.qtensor.qtensor import QTensor


def trace(
    function: Any, variables: Any, args: tuple[Any, ...]
) -> tuple[Graph, tracing.Traced]:
    """Traces a model to a graph with frozen weights as `QuantizedOperand`s.

    Args:
        function: function of `variables` and `args`.
        variables: serving variables.
        args: arguments, or their shapes.

    Raises:
        ValueError: if quantized contractions have weights, and none is frozen.
    """
    with contract.replaced_by(_in_float):
        graph, traced = importing.trace(function, variables, args)
    return _settled(graph), traced


def _in_float(
    cfg: config.DotGeneral, operation: Operation, lhs: Any, rhs: Any, out_dtype: Any
) -> jax.Array:
    """Contracts floats, with a mark on each operand that the config quantizes."""
    if cfg.out.is_quantized:
        raise ValueError(
            "a contraction quantizes its result (cfg.out), which files of float "
            "activations do not: set cfg.out to config.Tensor()"
        )
    lhs, rhs = _marked(cfg.fwd, "lhs", lhs), _marked(cfg.fwd, "rhs", rhs)
    return operation.masked(operation.in_float(lhs, rhs, None, out_dtype, None))


def _marked(cfg: config.DotGeneralRaw, side: Side, x: Any) -> Any:
    tensor = cfg.lhs if side == "lhs" else cfg.rhs
    if isinstance(x, QTensor):
        if tensor.grid.arithmetic != "integer":
            raise ValueError(
                f"fwd.{side}, a weight of shape {x.shape}, has {tensor.numerics!r}, "
                "and weights in files are integers: take numerics.IntSymmetric or "
                "numerics.IntAffine"
            )
        leaves, structure = jax.tree.flatten(_values(x))
        return _operand_p.bind(*leaves, operator=QuantizedOperand(cfg, side, structure))
    if not tensor.is_quantized:
        return x
    return _operand_p.bind(x, operator=QuantizedOperand(cfg, side))


def _values(q: QTensor) -> QTensor:
    """A `QTensor` without what only JAX's contractions use."""
    return QTensor(
        q.qvalue, q.scale, q.dtype, q.order, q.zero_point, q.numerics, padding=q.padding
    )


_operand_p = core.Primitive(importing.OPERAND)


@_operand_p.def_abstract_eval
def _type_of(*avals: Any, operator: QuantizedOperand) -> Any:
    made = jax.eval_shape(operator.compute, *avals)
    return avals[0].update(shape=made.shape, dtype=made.dtype)


def _settled(graph: Graph) -> Graph:
    """Removes the marks of float operands, and reports which of them are weights."""
    builder, static = Builder(graph), graph.static_values()
    unconverted, of_activations, count = [], [], 0
    for node in graph.nodes:
        operator = node.operator
        if not isinstance(operator, QuantizedOperand):
            builder.keep(node)
        elif operator.structure is not None:
            count += 1
            builder.keep(node)
        else:
            (x,) = node.inputs
            builder.replace(node.output, builder.resolve(x))
            if x in static:
                unconverted.append(node.place)
            elif operator.side == "rhs":
                of_activations.append(node.place)
    if unconverted and not count:
        raise ValueError(
            "the model quantizes contractions, and its weights are floats: export it "
            "with the variables of a conversion for serving (aqtlite.flax.convert, "
            "aqtlite.flax.nnx.convert or aqtlite.convert_function), or give ranges of "
            "its float model, from edge.calibrate"
        )
    _log("weights that are not frozen stay in float in the file", unconverted)
    _log("contractions of two activations stay in float in the file", of_activations)
    return builder.build(graph)


def _log(what: str, paths: Sequence[str]) -> None:
    if paths:
        logging.warning("%s: %s", what, ", ".join(dict.fromkeys(paths)))
