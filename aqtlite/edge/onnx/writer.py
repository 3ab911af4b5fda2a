"""Construction of ONNX graphs from arrays with grids."""

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from aqtlite.edge.check import digest, key_of
from aqtlite.edge.grid import Grid
from aqtlite.extras import package

OPSET = 21
"""First opset with int4 and int16 in QuantizeLinear and DequantizeLinear."""

IR_VERSION = 10


class NotWritable(Exception):
    """An operator has no form in ONNX; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class Array:
    """An array of the graph."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    """Dtype of the values: float32 if there is a grid, whatever is stored."""

    grid: Grid | None = None
    """Grid of the stored integers; None if the values are not quantized."""

    known: np.ndarray | None = None
    """Values of a constant without a grid; otherwise None."""

    is_stored: bool = False
    """Whether the array is a constant with a grid."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def stored_grid(grid: Grid) -> tuple[str, np.ndarray]:
    """The dtype and zero points of a grid in the file.

    Activations of int8 are stored as uint8, with integers and zero points 128 higher:
    on x86, onnxruntime by default leaves most int8 operators in float, but it fuses
    uint8 operators everywhere. The grids of weights are as they are stored.
    """
    zero_points = np.full(np.shape(grid.scale), grid.zero_point, np.int64)
    if grid.dtype == "int8" and grid.axis is None:
        return "uint8", zero_points + 128
    return grid.dtype, zero_points


class Writer:
    """Collects the nodes and constants of a graph."""

    def __init__(self, largest_int8: int) -> None:
        """Begins a graph.

        Args:
            largest_int8: largest magnitude of weights that are stored as int8; those
                with larger ones are stored as uint8, 128 higher.
        """
        self._largest_int8 = largest_int8
        self._onnx = package("onnx")
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self._names: dict[str, int] = {}
        self._constants: dict[tuple[Any, ...], str] = {}
        self._stored: dict[tuple[Any, ...], Array] = {}
        self._floats: dict[str, str] = {}
        self._frozen: dict[tuple[Any, ...], str] = {}
        self._dynamic: dict[str, tuple[str, str, str]] = {}
        self._barriers: set[str] = set()

    @property
    def has_integers(self) -> bool:
        """Whether the graph has a DequantizeLinear so far, beside those of weights."""
        frozen = set(self._frozen.values())
        return any(
            node.op_type == "DequantizeLinear" and node.input[0] not in frozen
            for node in self.nodes
        )

    def name(self, wanted: str) -> str:
        """Makes a unique name."""
        count = self._names.get(wanted, 0)
        self._names[wanted] = count + 1
        return f"{wanted}.{count}" if count else wanted

    def node(
        self, operator: str, inputs: Sequence[str], name: str, **attributes: Any
    ) -> str:
        """Adds a node; returns the name of its output."""
        (output,) = self.node_of_several(operator, inputs, [name], **attributes)
        return output

    def node_of_several(
        self,
        operator: str,
        inputs: Sequence[str],
        names: Sequence[str],
        **attributes: Any,
    ) -> list[str]:
        """Adds a node with several outputs; returns their names."""
        outputs = list(map(self.name, names))
        make = self._onnx.helper.make_node
        self.nodes.append(make(operator, list(inputs), outputs, **attributes))
        return outputs

    def initializer(self, array: Any, dtype: str, name: str) -> str:
        """Adds a constant, or reuses an equal one; returns its name."""
        stored = np.asarray(array).astype(dtype)
        key = dtype, stored.shape, hashlib.sha256(stored.tobytes()).digest()
        if key not in self._constants:
            self._constants[key] = self._added(stored, name)
        return self._constants[key]

    def _added(self, array: np.ndarray, name: str) -> str:
        found = self.name(name)
        self.initializers.append(self._onnx.numpy_helper.from_array(array, found))
        return found

    def constant(self, array: Any, name: str = "constant") -> Array:
        """Adds a constant without a grid."""
        array = np.asarray(array)
        dtype = array.dtype.name
        found = self.initializer(array, dtype, name)
        return Array(found, array.shape, array.dtype, known=array)

    def indices(self, values: Sequence[int]) -> str:
        """Adds a vector of int64, such as a shape or axes; returns its name."""
        return self.initializer(np.asarray(values, np.int64), "int64", "indices")

    def stored(self, qvalue: Any, grid: Grid, name: str) -> Array:
        """Adds a constant of integers with a grid, or reuses an equal one."""
        dtype, _ = stored_grid(grid)
        array = np.asarray(qvalue, np.int32)
        key = dtype, array.shape, key_of(array, grid.scale, grid.zero_point)
        if key not in self._stored:
            self._stored[key] = self._integers(array, grid, name)
        return self._stored[key]

    def _integers(self, array: np.ndarray, grid: Grid, name: str) -> Array:
        dtype, _ = stored_grid(grid)
        if self.is_raised(array, dtype):
            grid, dtype = grid.in_uint8(), "uint8"
        if dtype == "uint8":
            array = array + 128
        found = self._added(array.astype(jnp.dtype(dtype)), name)
        if dtype == "int4":
            # No kernel takes int4; onnxruntime folds the cast when it loads the file.
            found = self.node(
                "Cast", [found], f"{name}/int8", to=self._onnx.TensorProto.INT8
            )
            grid = dataclasses.replace(grid, dtype="int8")
        floats = np.dtype(np.float32)
        return Array(found, array.shape, floats, grid, is_stored=True)

    def is_raised(self, integers: np.ndarray, dtype: str) -> bool:
        """Whether the integers of a weight are stored as uint8 in place of int8."""
        largest = np.abs(integers.astype(np.int32)).max(initial=0)
        return dtype == "int8" and int(largest) > self._largest_int8

    def frozen(self, integers: Any, dtype: str, name: str) -> str:
        """Adds the integers of a frozen weight, or reuses equal ones; returns the name.

        The steps of an unrolled scan share their weights.
        """
        array = np.asarray(integers).astype(jnp.dtype(dtype))
        key = dtype, array.shape, digest(array)
        if key not in self._frozen:
            self._frozen[key] = self._added(array, name)
        return self._frozen[key]

    def dynamically_quantized(self, x: Array) -> tuple[str, str, str]:
        """Quantizes an array by its own range; returns integers, scale, zero point."""
        if x.name not in self._dynamic:
            q, scale, zero_point = self.node_of_several(
                "DynamicQuantizeLinear",
                [x.name],
                [f"{x.name}/{part}" for part in ("quantized", "scale", "zero_point")],
            )
            self._dynamic[x.name] = q, scale, zero_point
        return self._dynamic[x.name]

    def floats(self, x: Array) -> str:
        """The name of an array's values in float, dequantized if it has a grid."""
        if x.grid is None:
            return x.name
        if x.name not in self._floats:
            attributes = {} if x.grid.axis is None else {"axis": x.grid.axis}
            self._floats[x.name] = self.node(
                "DequantizeLinear",
                [x.name, *self._parameters(x.grid)],
                f"{x.name}/float",
                **attributes,
            )
        return self._floats[x.name]

    def in_floats(self, x: Array) -> Array:
        """An array dequantized, for operators left in float."""
        if x.grid is None:
            return x
        return Array(self.floats(x), x.shape, x.dtype, known=x.known)

    def quantize(
        self, floats: str, shape: Sequence[int], grid: Grid, name: str
    ) -> Array:
        """Quantizes values to a grid."""
        found = self.node("QuantizeLinear", [floats, *self._parameters(grid)], name)
        return Array(found, tuple(shape), np.dtype(np.float32), grid)

    def barrier(self, x: Array, name: str) -> Array:
        """Adds a Max that changes no float, unless the array comes from one.

        It is outside the patterns by which onnxruntime fuses and moves the operators
        around it.
        """
        if x.name in self._barriers:
            return x
        lowest = self.initializer(np.finfo(np.float32).min, "float32", "lowest")
        made = self.apply("Max", [x], x.shape, None, name, lowest)
        self._barriers.add(made.name)
        return made

    def interface(
        self, operator: str, x: str, grid: Grid, name: str | None = None
    ) -> str:
        """Dequantizes an integer input, or quantizes an output; returns the name.

        Unlike other activations, these have the dtype and zero point of the grid.
        """
        parameters = [
            self.initializer(np.asarray(grid.scale, np.float32), "float32", "scale"),
            self.initializer(np.asarray(grid.zero_point), grid.dtype, "zero_point"),
        ]
        return self.node(operator, [x, *parameters], name or f"{x}/float")

    def _parameters(self, grid: Grid) -> list[str]:
        scale = self.initializer(grid.scale, "float32", "scale")
        return [scale, self.zero_points(grid)]

    def zero_points(self, grid: Grid) -> str:
        """Adds the zero points of a grid; returns their name."""
        dtype, found = stored_grid(grid)
        if grid.axis is None:
            return self.initializer(found, dtype, "zero_point")
        # Not shared: some sessions convert weights to uint8, and their zero points.
        return self._added(found.astype(dtype), "zero_point")

    def apply(
        self,
        operator: str,
        inputs: Sequence[Array],
        shape: Sequence[int],
        grid: Grid | None,
        name: str,
        *more: str,
        **attributes: Any,
    ) -> Array:
        """Adds an operator on values; quantizes the output if there is a grid.

        Args:
            operator: name of the operator in ONNX.
            inputs: first inputs.
            shape: shape of the output.
            grid: grid of the output; None if it is not quantized.
            name: name of the output.
            *more: names of further inputs.
            **attributes: attributes of the operator.
        """
        names = [*map(self.floats, inputs), *more]
        if grid is None:
            made = self.node(operator, names, name, **attributes)
            return Array(made, tuple(shape), inputs[0].dtype)
        floats = self.node(operator, names, f"{name}/unrounded", **attributes)
        return self.quantize(floats, shape, grid, name)

    def transpose(self, x: Array, permutation: Sequence[int], name: str) -> Array:
        """Transposes an array, unless the permutation is the identity."""
        if list(permutation) == list(range(len(x.shape))):
            return x
        shape = [x.shape[i] for i in permutation]
        return self.apply(
            "Transpose", [x], shape, x.grid, name, perm=list(map(int, permutation))
        )

    def reshape(self, x: Array, shape: Sequence[int], name: str) -> Array:
        """Reshapes an array, unless it has the shape already."""
        if tuple(shape) == x.shape:
            return x
        return self.apply("Reshape", [x], shape, x.grid, name, self.indices(shape))

    def cast(self, x: Array, dtype: Any, name: str) -> Array:
        """Converts values to a dtype, unless they have it already."""
        dtype = np.dtype(dtype)
        if x.dtype == dtype:
            return x
        to = self._onnx.helper.np_dtype_to_tensor_dtype(dtype)
        made = self.node("Cast", [self.floats(x)], name, to=to)
        return Array(made, x.shape, dtype)

    def finish(
        self, name: str, inputs: Sequence[Array], outputs: Sequence[Array]
    ) -> bytes:
        """Serializes the model to bytes.

        Raises:
            ValueError: if the model exceeds the 2 GiB limit of an ONNX file.
        """
        helper = self._onnx.helper
        used = {name for node in self.nodes for name in node.input}

        def info(x: Array) -> Any:
            dtype = np.dtype(x.dtype if x.grid is None else x.grid.dtype)
            kind = helper.np_dtype_to_tensor_dtype(dtype)
            return helper.make_tensor_value_info(x.name, kind, x.shape)

        graph = helper.make_graph(
            self.nodes,
            name,
            [info(x) for x in inputs],
            [info(x) for x in outputs],
            [one for one in self.initializers if one.name in used],
        )
        model = helper.make_model(
            graph,
            producer_name="aqtlite",
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
        )
        if model.ByteSize() >= 2**31:
            raise ValueError(
                f"the model has {model.ByteSize():,} bytes, and one ONNX file holds "
                "less than 2 GiB: export parts of it"
            )
        data: bytes = model.SerializeToString()
        return data
