"""Loading of ONNX files as functions of JAX."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aqtlite.onnx import reading
from aqtlite.onnx.evaluation import evaluate
from aqtlite.onnx.graph import Graph


@dataclasses.dataclass(frozen=True)
class Array:
    """An input or output of a network."""

    name: str

    shape: tuple[int | str | None, ...] | None
    """Size of each axis, the name of one that varies, or None; None for any rank."""

    dtype: np.dtype[Any] | None
    """Dtype in the file; None for any. JAX computes 64-bit types in 32 bits by
    default."""


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """An ONNX network as a function of its parameters and inputs.

    ``network(parameters, *inputs)`` returns an array, or a tuple of arrays if the
    network has several outputs, in the order of `outputs`. Inputs can also be given by
    name. The function is pure: it can be transformed and quantized as any function.
    """

    inputs: tuple[Array, ...]
    """Inputs, in the order of arguments."""

    outputs: tuple[Array, ...]
    """Outputs, in the order of results."""

    _graph: Graph = dataclasses.field(repr=False)
    _shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(repr=False)

    def __call__(self, parameters: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Evaluates the network.

        Args:
            parameters: parameters by name, as `load` returns them.
            args: inputs, in the order of `inputs`.
            kwargs: further inputs, by name.

        Returns:
            The output, or a tuple of outputs.

        Raises:
            TypeError: if an input is missing, unknown, or of another dtype, or
                parameters are no floats.
            ValueError: if an input or a parameter has another shape than declared, if a
                shape inside the network depends on data, or if a node of the file
                cannot be computed, such as a reshape to another number of elements.
        """
        self._check_parameters(parameters)
        inputs = self._inputs(args, kwargs)
        results = evaluate(self._graph, parameters, inputs, {})
        arrays = tuple(jnp.asarray(result) for result in results)
        return arrays[0] if len(arrays) == 1 else arrays

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        names = [one.name for one in self.inputs]
        if len(args) > len(names):
            raise TypeError(
                f"the network has {len(names)} inputs, {', '.join(names)}; got "
                f"{len(args)}"
            )
        given = dict(zip(names, args, strict=False))
        for name, value in kwargs.items():
            if name not in names or name in given:
                problem = "is given twice" if name in given else "is unknown"
                raise TypeError(f"input {name!r} {problem}; inputs: {', '.join(names)}")
            given[name] = value
        missing = [name for name in names if name not in given]
        if missing:
            raise TypeError(f"the network needs the inputs {', '.join(missing)}")
        inputs = [_checked(one, given[one.name]) for one in self.inputs]
        self._check_sizes(inputs)
        return inputs

    def _check_sizes(self, inputs: list[jax.Array]) -> None:
        """Checks that axes with one symbolic size agree."""
        sizes: dict[str, tuple[str, int]] = {}
        for one, value in zip(self.inputs, inputs, strict=True):
            for size, given in zip(one.shape or (), value.shape, strict=False):
                if not isinstance(size, str):
                    continue
                name, first = sizes.setdefault(size, (one.name, given))
                if given != first:
                    raise ValueError(
                        f"inputs {name!r} and {one.name!r} have axes of the size "
                        f"{size!r} in the network, got {first} and {given}"
                    )

    def _check_parameters(self, parameters: Mapping[str, Any]) -> None:
        if not isinstance(parameters, Mapping):
            raise TypeError(
                "the first argument is the dictionary of parameters that "
                f"aqtlite.onnx.load returned; got {type(parameters).__name__}"
            )
        for name, shape in self._shapes.items():
            if name not in parameters:
                raise ValueError(
                    f"the parameter {name!r} is missing: the first argument is the "
                    "dictionary of parameters that aqtlite.onnx.load returned"
                )
            if jnp.shape(parameters[name]) != shape:
                raise ValueError(
                    f"the parameter {name!r} has the shape {shape} in the network, got "
                    f"{jnp.shape(parameters[name])}"
                )
            dtype = jnp.result_type(parameters[name])
            if not jnp.issubdtype(dtype, jnp.floating):
                raise TypeError(
                    f"the parameter {name!r} has the dtype {dtype}; parameters of the "
                    "network are floats"
                )


def _checked(array: Array, value: Any) -> jax.Array:
    """Returns an input as an array of the declared type."""
    if array.dtype is None:
        return jnp.asarray(value)
    if not hasattr(value, "dtype"):
        value = np.asarray(value)
        if value.dtype.kind == array.dtype.kind:
            value = value.astype(array.dtype)
    expected = jax.dtypes.canonicalize_dtype(array.dtype)
    if jax.dtypes.canonicalize_dtype(value.dtype) != expected:
        raise TypeError(
            f"input {array.name!r} is {array.dtype} in the network, got {value.dtype}: "
            "cast it"
        )
    if array.shape is None:
        return jnp.asarray(value)
    fits = len(array.shape) == value.ndim and all(
        size == given
        for size, given in zip(array.shape, value.shape, strict=True)
        if isinstance(size, int)
    )
    if not fits:
        shape = ", ".join("?" if n is None else str(n) for n in array.shape)
        raise ValueError(
            f"input {array.name!r} has the shape ({shape}) in the network, got "
            f"{tuple(value.shape)}"
        )
    return jnp.asarray(value)


def load(
    model: str | os.PathLike[str] | Any, *, constants: Mapping[str, Any] | None = None
) -> tuple[Network, dict[str, jax.Array]]:
    """Loads an ONNX network as a function of JAX and its parameters.

    >>> import numpy as np
    >>> from onnx import TensorProto, helper, numpy_helper
    >>> import aqtlite.onnx
    >>> product = helper.make_node("MatMul", ["x", "kernel"], ["y"], "/head/MatMul")
    >>> x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2])
    >>> y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])
    >>> kernel = numpy_helper.from_array(np.ones((2, 3), np.float32), "kernel")
    >>> graph = helper.make_graph([product], "network", [x], [y], [kernel])
    >>> network, parameters = aqtlite.onnx.load(helper.make_model(graph))
    >>> network.inputs
    (Array(name='x', shape=('batch', 2), dtype=dtype('float32')),)
    >>> print(jax.jit(network)(parameters, np.ones((1, 2), np.float32)))
    [[2. 2. 2.]]

    Args:
        model: path of a file, or an `onnx.ModelProto`.
        constants: inputs by name that become constants, and are no inputs any more. Of
            a network whose shapes or branches depend on an input, this makes them
            known in tracing.

    Returns:
        Function of ``(parameters, *inputs)``, and parameters by the names that the
        file gives its weights. Weights are initializers and constants of floats with
        more than one element; single elements are weights where a layer has them.

    Raises:
        ModuleNotFoundError: if the package onnx is not installed.
        FileNotFoundError: if the file, or one of the files with its weights, is
            missing.
        TypeError: if the model is neither a path nor an `onnx.ModelProto`.
        ValueError: if the file is no ONNX file, has an operator that is not
            registered, or nodes that read or write values in a way that ONNX excludes.
    """
    source = reading.read(model)
    graph, parameters = reading.graph_of(source, dict(constants or {}))
    names = set(graph.inputs)
    proto = source.proto.graph
    network = Network(
        tuple(_array(one) for one in proto.input if one.name in names),
        tuple(_array(one) for one in proto.output),
        graph,
        {name: array.shape for name, array in parameters.items()},
    )
    return network, jax.device_put(parameters)


def _array(proto: Any) -> Array:
    return Array(proto.name, *reading.shape_and_dtype(proto))
