"""Operators compute what onnxruntime computes, on arrays and on known values."""

import collections
import functools

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import aqtlite.onnx
from tests.common import inside_shard_map
from tests.onnx.cases import FAMILIES, Known

pytestmark = pytest.mark.code("quick")


def session_of(made):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = (
        onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    )
    return onnxruntime.InferenceSession(made.SerializeToString(), options)


def add(case, number, nodes, inputs, weights):
    """Adds the node of a case; returns the names of its outputs."""
    names = []
    for position, one in enumerate(case.inputs):
        names.append("" if one is None else f"{number}_{position}")
        if isinstance(one, Known):
            weights[names[-1]] = one.array
        elif one is not None:
            inputs[names[-1]] = one
    outputs = [f"{number}_out{position}" for position in range(case.outputs)]
    nodes.append(helper.make_node(case.op, names, outputs, **case.attributes))
    return outputs


def build(cases, opset):
    """A model with all cases of an opset, its inputs, and outputs by case."""
    nodes, inputs, weights = [], {}, {}
    outputs = {n: add(case, n, nodes, inputs, weights) for n, case in cases.items()}
    graph = helper.make_graph(
        nodes,
        "cases",
        [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape
            )
            for name, x in inputs.items()
        ],
        [
            onnx.ValueInfoProto(name=name)
            for names in outputs.values()
            for name in names
        ],
        [numpy_helper.from_array(x, name) for name, x in weights.items()],
    )
    opsets = [helper.make_opsetid("", opset)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return made, inputs, outputs


def by_opset(family):
    """Opsets with the cases of a family, by number."""
    found = collections.defaultdict(dict)
    for number, case in enumerate(FAMILIES[family]):
        found[case.opset][number] = case
    return found.items()


@functools.cache
def results(family):
    """(expected, computed, computed of known inputs) by case of a family."""
    found = {}
    for opset, cases in by_opset(family):
        made, inputs, outputs = build(cases, opset)
        expected = session_of(made).run(None, inputs)
        names = [name for names in outputs.values() for name in names]
        function, parameters = aqtlite.onnx.load(made)
        computed = jax.jit(function)(parameters, **inputs)
        constant, parameters = aqtlite.onnx.load(made, constants=inputs)
        of_known = jax.jit(constant)(parameters)
        if len(names) == 1:
            computed, of_known = (computed,), (of_known,)
        triples = iter(list(zip(expected, computed, of_known, strict=True)))
        for number, of_case in outputs.items():
            found[number] = [next(triples) for _ in of_case]
    return found


@pytest.mark.parametrize(
    ("family", "number"),
    [
        pytest.param(family, number, id=f"{family}-{number}-{case}")
        for family, cases in FAMILIES.items()
        for number, case in enumerate(cases)
    ],
)
def test_equals_onnxruntime(family, number):
    for expected, *computed in results(family)[number]:
        for one in computed:
            assert one.shape == expected.shape
            assert one.dtype == jax.dtypes.canonicalize_dtype(expected.dtype)
            np.testing.assert_allclose(one, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_inside_shard_map(family):
    for opset, cases in by_opset(family):
        made, inputs, _ = build(cases, opset)
        function, parameters = aqtlite.onnx.load(made)

        def run(inputs, function=function, parameters=parameters):
            return function(parameters, **inputs)

        inside, outside = (
            [(x.shape, x.dtype) for x in jax.tree.leaves(jax.eval_shape(one, inputs))]
            for one in (functools.partial(inside_shard_map, run), run)
        )
        assert inside == outside
