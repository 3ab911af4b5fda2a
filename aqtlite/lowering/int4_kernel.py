"""A kernel of int4 weights for x86-64, compiled by LLVM, as a custom call of XLA:CPU.

LLVM comes with llvmlite, the package of the extra ``cpu``. XLA has no instruction that
multiplies a nibble; the kernel reads weights as they are stored, 8 rows of them at a
time, and widens them in registers. `int4_products` calls it.
"""

import contextlib
import ctypes
import dataclasses
import functools
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jax

from aqtlite import extras

BLOCK = 32
"""Number of products that are summed before the sums are widened."""

LANES = 8
"""Number of weights' rows in a vector."""

_ROWS = 16
"""Number of rows whose sums are kept beside the weights that are widened once."""

_PACKAGE = "llvmlite"

# Offsets in bytes of fields of XLA's frame of a call (xla/ffi/api/c_api.h): a structure
# begins with its size and its extensions.
_EXTENSION, _ARGUMENTS, _RESULTS = 8, 72, 112
_METADATA, _VERSION, _TRAITS = 24, 24, 32
_DATA, _SIZES = 24, 40
_MAJOR = 0
_ALIGN = 32


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What is compiled into a kernel."""

    digits: int
    """Number of digits of an element of the other operand."""

    is_scaled: bool
    """Whether sums are scaled and added over tiles, to float32, or returned."""

    is_single: bool
    """Whether a tile is a single block."""

    has_dots: bool
    """Whether the processor multiplies uint8 by int8 and adds four products (VNNI)."""


@functools.cache
def version() -> tuple[int, int] | None:
    """The version of XLA's interface for custom calls; None if the kernel has no use.

    It has none where llvmlite is not installed, on other processors than x86-64 with
    AVX2, or with an interface that it does not know.
    """
    if not extras.is_installed(_PACKAGE):
        return None
    header = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    found = re.findall(r"#define XLA_FFI_API_M\w+ (\d+)", header.read_text())
    major, minor = map(int, found)
    return (major, minor) if major == _MAJOR else None


@functools.cache
def compiles_dots() -> bool:
    """Returns True if LLVM knows that this processor has VNNI."""
    found = extras.package("llvmlite.binding").get_host_cpu_features()
    has_wide = found.get("avx512vnni", False) and found.get("avx512vl", False)
    return has_wide or found.get("avxvnni", False)


@functools.cache
def registered(kernel: Kernel) -> str:
    """Compiles a kernel, and returns the name of its custom call."""
    binding = extras.package("llvmlite.binding")
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    parts = map(int, dataclasses.astuple(kernel))
    name = "_".join(["aqtlite_int4", *map(str, parts)])
    module = binding.parse_assembly(text(kernel, name))
    module.verify()
    features = binding.get_host_cpu_features().flatten()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=features, opt=3
    )
    options = binding.create_pipeline_tuning_options(speed_level=2)
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _ENGINES.append(engine)
    address = ctypes.c_void_p(engine.get_function_address(name))
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(address), platform="cpu")
    return name


_ENGINES: list[Any] = []
"""Owners of the code of kernels."""


def text(kernel: Kernel, name: str) -> str:
    """The kernel as a function in LLVM's language."""
    return str(_Builder(kernel, name).module)


class _Builder:
    """Writes a handler of custom calls: version and frame, then the loops."""

    def __init__(self, kernel: Kernel, name: str):
        ir = extras.package("llvmlite.ir")
        self.ir, self.kernel = ir, kernel
        self.byte, self.int, self.long = (ir.IntType(n) for n in (8, 32, 64))
        self.pointer, self.float = ir.PointerType(), ir.FloatType()
        self.bytes = ir.VectorType(self.byte, 4 * LANES)
        self.halves = ir.VectorType(ir.IntType(16), 2 * LANES)
        self.ints = ir.VectorType(self.int, LANES)
        self.floats = ir.VectorType(self.float, LANES)
        self.module = ir.Module(name)
        self.module.triple = extras.package("llvmlite.binding").get_default_triple()
        kind = ir.FunctionType(self.pointer, [self.pointer])
        function = ir.Function(self.module, kind, name)
        self.at = ir.IRBuilder(function.append_basic_block("entry"))
        self._handler(function.args[0])

    def _handler(self, frame: Any) -> None:
        extension = self._load(frame, _EXTENSION, self.pointer)
        none = self.ir.Constant(self.pointer, None)
        with self.at.if_then(self.at.icmp_unsigned("!=", extension, none)):
            metadata = self._load(extension, _METADATA, self.pointer)
            for offset, value in ((0, 0), (4, version()[1]), (8, 0)):
                where = self._offset(metadata, _VERSION + offset)
                self.at.store(self.int(value), where)
            self.at.ret(none)
        self._compute(frame)
        self.at.ret(none)

    # Values in memory.

    def _offset(self, pointer: Any, offset: Any) -> Any:
        offset = self.long(offset) if isinstance(offset, int) else offset
        return self.at.gep(pointer, [offset], source_etype=self.byte)

    def _load(self, pointer: Any, offset: Any, kind: Any, align: int = 1) -> Any:
        where = self._offset(pointer, offset)
        return self.at.load(where, typ=kind, align=align)

    def _times(self, a: Any, b: Any) -> Any:
        a, b = (self.long(x) if isinstance(x, int) else x for x in (a, b))
        return self.at.mul(a, b)

    def _buffer(self, frame: Any, field: int, index: int) -> Any:
        array = self._load(frame, field, self.pointer)
        return self._load(array, 8 * index, self.pointer)

    def _data(self, buffer: Any) -> Any:
        return self._load(buffer, _DATA, self.pointer)

    def _size(self, buffer: Any, axis: int) -> Any:
        sizes = self._load(buffer, _SIZES, self.pointer)
        return self._load(sizes, 8 * axis, self.long)

    # Vectors.

    def _splat(self, value: Any, count: int = LANES) -> Any:
        kind = self.ir.VectorType(value.type, count)
        first = self.at.insert_element(
            self.ir.Constant(kind, self.ir.Undefined), value, self.int(0)
        )
        return self._shuffled(first, first, [0] * count)

    def _shuffled(self, a: Any, b: Any, order: list[int]) -> Any:
        mask = self.ir.Constant(self.ir.VectorType(self.int, len(order)), order)
        return self.at.shuffle_vector(a, b, mask)

    def _call(self, name: str, kind: Any, *args: Any) -> Any:
        types = [arg.type for arg in args]
        function = self.module.globals.get(name) or self.ir.Function(
            self.module, self.ir.FunctionType(kind, types), name
        )
        return self.at.call(function, args)

    @contextlib.contextmanager
    def _loop(self, start: Any, stop: Any, step: int) -> Iterator[Any]:
        """Runs its body at least once, with an index below `stop`."""
        before = self.at.block
        body = self.at.append_basic_block("body")
        end = self.at.append_basic_block("end")
        self.at.branch(body)
        self.at.position_at_end(body)
        index = self.at.phi(self.long)
        index.add_incoming(start, before)
        yield index
        following = self.at.add(index, self.long(step))
        index.add_incoming(following, self.at.block)
        is_more = self.at.icmp_signed("<", following, stop)
        self.at.cbranch(is_more, body, end)
        self.at.position_at_end(end)

    def _least(self, a: Any, b: Any) -> Any:
        return self.at.select(self.at.icmp_signed("<", a, b), a, b)

    # The sums.

    def _compute(self, frame: Any) -> None:
        weights, x, offsets, *others = (
            self._data(self._buffer(frame, _ARGUMENTS, i))
            for i in range(5 if self.kernel.is_scaled else 3)
        )
        out = self._buffer(frame, _RESULTS, 0)
        at, zero, digits = self.at, self.long(0), self.kernel.digits
        rows, columns = (self._size(out, axis) for axis in (0, 1))
        inputs = self._buffer(frame, _ARGUMENTS, 1)
        tiles, blocks = (self._size(inputs, axis) for axis in (0, 1))
        row_bytes = self._times(self._times(tiles, blocks), BLOCK // 2)
        sums, totals = (at.alloca(self.ints, _ROWS * count) for count in (digits, 1))
        sums.align = totals.align = _ALIGN
        result = self._data(out)
        last = at.sub(columns, self.long(LANES))
        with self._loop(zero, rows, _ROWS) as row:
            count = self._least(at.sub(rows, row), self.long(_ROWS))
            lines = self._times(count, digits)
            with self._loop(zero, columns, LANES) as index:
                column = self._least(index, last)
                weight = self._offset(weights, self._times(column, row_bytes))
                with self._loop(zero, tiles, 1) as tile:
                    before = at.add(self._times(tile, rows), row)
                    each = self._offset(offsets, self._times(before, 4 * digits))

                    def widened(block: Any) -> tuple[list[Any], Any]:
                        step = at.add(self._times(tile, blocks), block)
                        where = self._times(step, BLOCK // 2)
                        line = at.add(self._times(step, rows), row)
                        line = self._offset(x, self._times(line, digits * BLOCK))
                        return self._widened(
                            self._offset(weight, where), row_bytes
                        ), line

                    if self.kernel.is_single:
                        wide, line = widened(zero)

                        def sum_of(i: Any) -> Any:
                            return self._products(
                                self._offset_of(each, i), wide, line, i
                            )
                    else:
                        with self._loop(zero, lines, 1) as i:
                            self._put(sums, i, self._offset_of(each, i))
                        with self._loop(zero, blocks, 1) as block:
                            wide, line = widened(block)
                            with self._loop(zero, lines, 1) as i:
                                total = self._get(sums, i)
                                self._put(sums, i, self._products(total, wide, line, i))
                        sum_of = functools.partial(self._get, sums)
                    if self.kernel.is_scaled:
                        factors, scales = others
                        scale = self._scale(scales, column, tile, tiles)
                        factor = self._offset(factors, self._times(before, 4))
                        self._accumulate(totals, sum_of, scale, factor, count, tile)
                found = totals if self.kernel.is_scaled else sums
                with self._loop(zero, count, 1) as i:
                    here = self._times(at.add(row, i), columns)
                    where = self._times(at.add(here, column), 4)
                    at.store(self._get(found, i), self._offset(result, where), align=4)

    def _get(self, array: Any, index: Any) -> Any:
        where = self._offset(array, self._times(index, 4 * LANES))
        return self.at.load(where, typ=self.ints, align=_ALIGN)

    def _put(self, array: Any, index: Any, value: Any) -> None:
        where = self._offset(array, self._times(index, 4 * LANES))
        self.at.store(self.at.bitcast(value, self.ints), where, align=_ALIGN)

    def _offset_of(self, offsets: Any, line: Any) -> Any:
        """What raising the weights adds to the sums of a line, negated."""
        return self._splat(self._load(offsets, self._times(line, 4), self.int, 4))

    def _widened(self, weights: Any, row_bytes: Any) -> list[Any]:
        """Reads a block of `LANES` rows of weights.

        Returns:
            Vectors of uint8, larger by 8 than the weights, with four of a row in each
            32 bits: of each eight, those of even and of odd positions.
        """
        at, quad = self.at, self.ir.VectorType(self.int, 4)
        rows = [
            self._load(weights, self._times(row_bytes, i), quad) for i in range(LANES)
        ]
        # Rows i and i + 4 in one vector, then transposed within both halves.
        both = [self._shuffled(rows[i], rows[i + 4], list(range(8))) for i in range(4)]
        low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
        a, b = (self._shuffled(both[0], both[1], order) for order in (low, high))
        c, d = (self._shuffled(both[2], both[3], order) for order in (low, high))
        first, second = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
        columns = [
            self._shuffled(*pair, order)
            for pair in ((a, c), (b, d))
            for order in (first, second)
        ]
        signs, mask = (
            self.ir.Constant(self.ints, [value] * LANES)
            for value in (0x88888888, 0x0F0F0F0F)
        )
        four = self.ir.Constant(self.ints, [4] * LANES)
        wide = []
        for column in columns:
            raised = at.xor(column, signs)
            wide += [at.and_(raised, mask), at.and_(at.lshr(raised, four), mask)]
        return [at.bitcast(one, self.bytes) for one in wide]

    def _products(self, total: Any, wide: list[Any], x: Any, line: Any) -> Any:
        """Adds the products of a block with a line of the other operand."""
        each = self._offset(x, self._times(line, BLOCK))
        others = [self._splat(self._load(each, 4 * i, self.int, 4)) for i in range(8)]
        others = [self.at.bitcast(one, self.bytes) for one in others]
        add = self._dots if self.kernel.has_dots else self._pairs
        return add(total, wide, others)

    def _dots(self, total: Any, wide: list[Any], others: list[Any]) -> Any:
        name = "llvm.x86.avx512.vpdpbusd.256"
        for a, b in zip(wide, others, strict=True):
            total = self._call(name, self.ints, total, a, b)
        return total

    def _pairs(self, total: Any, wide: list[Any], others: list[Any]) -> Any:
        # Two products are at most 2 * 15 * 128, and eight times that fits 16 bits.
        name = "llvm.x86.avx2.pmadd.ub.sw"
        parts = [
            self._call(name, self.halves, a, b)
            for a, b in zip(wide, others, strict=True)
        ]
        part = functools.reduce(self.at.add, parts)
        ones = self.ir.Constant(self.halves, [1] * (2 * LANES))
        widened = self._call("llvm.x86.avx2.pmadd.wd", self.ints, part, ones)
        return self.at.add(total, widened)

    def _scale(self, scales: Any, column: Any, tile: Any, tiles: Any) -> Any:
        """The scales of a tile of `LANES` rows of weights."""
        out = self.ir.Constant(self.floats, self.ir.Undefined)
        for lane in range(LANES):
            row = self.at.add(column, self.long(lane))
            place = self.at.add(self._times(row, tiles), tile)
            scale = self._load(scales, self._times(place, 4), self.float, 4)
            out = self.at.insert_element(out, scale, self.int(lane))
        return out

    def _accumulate(
        self, totals: Any, sum_of: Any, scale: Any, factors: Any, count: Any, tile: Any
    ) -> None:
        """Scales the sums of a tile, and adds them to the totals in float32."""
        at, digits = self.at, self.kernel.digits
        is_first = at.icmp_signed("==", tile, self.long(0))
        with self._loop(self.long(0), count, 1) as row:
            first = self._times(row, digits)
            parts = [
                at.sitofp(sum_of(at.add(first, self.long(i))), self.floats)
                for i in range(digits)
            ]
            total, base = parts[-1], self.ir.Constant(self.floats, [256.0] * LANES)
            for part in reversed(parts[:-1]):
                total = at.fadd(at.fmul(total, base), part)
            factor = self._load(factors, self._times(row, 4), self.float, 4)
            ordered = scale, self._splat(factor)
            for one in ordered if digits == 1 else reversed(ordered):
                total = at.fmul(total, one)
            before = at.bitcast(self._get(totals, row), self.floats)
            total = at.select(is_first, total, at.fadd(before, total))
            self._put(totals, row, total)
