"""Functions in LLVM's language that XLA:CPU calls, as it defines by `jax.ffi`.

LLVM comes with llvmlite, the package of the extra ``cpu``. A function computes columns
of one result from buffers, and the threads of XLA divide the columns: each takes some
that no other has taken, until none are left.
"""

import abc
import contextlib
import ctypes
import functools
import importlib.metadata
import pathlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from aqtlite import extras
from aqtlite.lowering.forms import processor

_PACKAGE, _OLDEST = "llvmlite", (0, 50)

_MAJOR = 0

_BEGINNING = ("struct_size", "extension_start")
_FIELDS = {
    "CallFrame": (
        *_BEGINNING,
        *("api", "ctx", "stage", "args", "rets", "attrs", "future"),
    ),
    "Args": (*_BEGINNING, "size", "types", "args"),
    "Rets": (*_BEGINNING, "size", "types", "rets"),
    "Attrs": (*_BEGINNING, "size", "types", "names", "attrs"),
    "Buffer": (*_BEGINNING, "dtype", "data", "rank", "dims"),
    "Metadata": (*_BEGINNING[:1], "api_version", "traits", "state_type_id"),
    "ThreadPool_Schedule_Args": (*_BEGINNING, "ctx", "task", "data"),
    "ThreadPool_NumThreads_Args": (*_BEGINNING, "ctx", "num_threads"),
    "Future_Create_Args": (*_BEGINNING, "future"),
    "Future_SetAvailable_Args": (*_BEGINNING, "future"),
}
"""Fields of XLA's structures as offsets below have them (xla/ffi/api/c_api.h)."""

# Offsets in bytes: of the frame of a call, of buffers, of metadata and of functions.
_EXTENSION, _API, _CONTEXT, _ARGUMENTS, _RESULTS, _FUTURE = 8, 16, 24, 72, 112, 168
_ATTRIBUTES = 136
_DATA, _RANK, _SIZES = 24, 32, 40
_METADATA, _VERSION = 24, 24
_FUNCTIONS = 48

# Number of columns that threads take at least, as a product with the work of one: some
# 40 us. To wake a thread takes a good part of that.
_WORK = 2**23


@functools.cache
def is_available() -> bool:
    """Returns True if LLVM is here, and XLA calls functions as is known here."""
    if not extras.is_installed(_PACKAGE):
        return False
    major, minor, *_ = importlib.metadata.version(_PACKAGE).split(".")
    return (int(major), int(minor)) >= _OLDEST and knows(_header())


def knows(header: str) -> bool:
    """Returns True if XLA's structures are those that are known here."""
    if _version(header)[:1] != (_MAJOR,) or "_Extension_Metadata = 1," not in header:
        return False
    for name, fields in _FIELDS.items():
        found = re.search(rf"\bstruct XLA_FFI_{name} {{(.*?)\n}};", header, re.DOTALL)
        body = "" if found is None else re.sub("//.*", "", found[1])
        if tuple(re.findall(r"(\w+);", body)) != fields:
            return False
    return True


@functools.cache
def _header() -> str:
    return pathlib.Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()


def _version(header: str) -> tuple[int, ...]:
    found = re.findall(r"#define XLA_FFI_API_M(?:AJOR|INOR) (\d+)", header)
    return tuple(map(int, found))


def register(name: str, write: Callable[[], "Function"]) -> None:
    """Compiles a function for this processor, and registers it for XLA:CPU.

    A name that is registered already is left as it is: XLA takes it once in a process,
    and threads may lower programs with one function at the same time.
    """
    with _LOCK:
        if name not in _ENGINES:
            engine = _compiled(write())
            address = ctypes.c_void_p(engine.get_function_address("handle"))
            handler = jax.ffi.pycapsule(address)
            jax.ffi.register_ffi_target(name, handler, platform="cpu")
            _ENGINES[name] = engine


_LOCK = threading.Lock()

_ENGINES: dict[str, Any] = {}
"""Owners of the code of functions, by name."""


def _compiled(function: "Function") -> Any:
    """Returns LLVM's engine, which owns the code."""
    binding = extras.package("llvmlite.binding")
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    module = binding.parse_assembly(str(function.module))
    module.verify()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=features(binding.get_host_cpu_features()),
        opt=3,
    )
    tuning = binding.create_pipeline_tuning_options(speed_level=2)
    passes = binding.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(module, passes)
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


def features(host: Mapping[str, bool]) -> str:
    """The features of this processor, without those that XLA is told not to use."""
    return ",".join(
        f"{'+' if has_it and processor.is_within_limit(name) else '-'}{name}"
        for name, has_it in host.items()
    )


class Function(abc.ABC):
    """Writes a function of buffers, and XLA's handler that calls it.

    The state of a call is an array of 64-bit words: what the subclass stores in
    `prepare`, and behind it what threads share.
    """

    words: int
    """Number of words that `prepare` stores."""

    @abc.abstractmethod
    def memory(self, frame: Any) -> Any:
        """Returns the number of bytes that `prepare` and `compute` take."""

    @abc.abstractmethod
    def prepare(self, frame: Any, state: Any, memory: Any) -> tuple[Any, Any]:
        """Stores pointers and sizes, and prepares the memory that was asked for.

        Returns:
            The number of columns, and the work of a column, as a number of products.
        """

    @abc.abstractmethod
    def compute(self, state: Any, start: Any, stop: Any) -> None:
        """Computes columns of the result."""

    def __init__(self) -> None:
        ir = extras.package("llvmlite.ir")
        self.ir = ir
        self.byte, self.int, self.long = (ir.IntType(n) for n in (8, 32, 64))
        self.pointer, self.none = ir.PointerType(), ir.VoidType()
        self.module = ir.Module("aqtlite")
        triple = extras.package("llvmlite.binding").get_default_triple()
        self.module.triple = triple
        self.null = ir.Constant(self.pointer, None)
        part = self._begin("part", self.none, self.pointer, self.long, self.long)
        self.compute(*part.args)
        self.at.ret_void()
        work = self._begin("work", self.none, self.pointer)
        self._work(work.args[0], part)
        handle = self._begin("handle", self.pointer, self.pointer)
        self._handle(handle.args[0], part, work)

    def _begin(self, name: str, result: Any, *args: Any) -> Any:
        kind = self.ir.FunctionType(result, args)
        function = self.ir.Function(self.module, kind, name)
        self.at = self.ir.IRBuilder(function.append_basic_block("entry"))
        return function

    # Values, memory and loops.

    def load(self, pointer: Any, offset: Any, kind: Any, align: int = 1) -> Any:
        return self.at.load(self.offset(pointer, offset), typ=kind, align=align)

    def store(self, value: Any, pointer: Any, offset: Any, align: int = 1) -> None:
        self.at.store(value, self.offset(pointer, offset), align=align)

    def offset(self, pointer: Any, offset: Any) -> Any:
        offset = self.long(offset) if isinstance(offset, int) else offset
        return self.at.gep(pointer, [offset], source_etype=self.byte)

    def array(self, kind: Any, count: int, align: int = 8) -> Any:
        """Memory of a call of the function that is being written."""
        with self.at.goto_entry_block():
            made = self.at.alloca(kind, count)
            made.align = align
            return self._cast(made, self.pointer)

    def variable(self, kind: Any) -> Any:
        """A variable that LLVM keeps in registers, where there are some left."""
        with self.at.goto_entry_block():
            return self.at.alloca(kind)

    def _cast(self, pointer: Any, kind: Any) -> Any:
        # To llvmlite, a cast from pointer to pointer is none.
        return self.at.inttoptr(self.at.ptrtoint(pointer, self.long), kind)

    def times(self, *factors: Any) -> Any:
        return functools.reduce(self.at.mul, map(self._as_long, factors))

    def sum(self, *terms: Any) -> Any:
        return functools.reduce(self.at.add, map(self._as_long, terms))

    def least(self, a: Any, b: Any) -> Any:
        a, b = self._as_long(a), self._as_long(b)
        return self.at.select(self.at.icmp_signed("<", a, b), a, b)

    def constant(self, kind: Any, value: float) -> Any:
        """A vector of equal elements."""
        return self.ir.Constant(kind, [value] * kind.count)

    def splat(self, value: Any, count: int) -> Any:
        kind = self.ir.VectorType(value.type, count)
        empty = self.ir.Constant(kind, self.ir.Undefined)
        first = self.at.insert_element(empty, value, self.int(0))
        return self.shuffled(first, [0] * count)

    def shuffled(self, a: Any, order: list[int], b: Any = None) -> Any:
        """Elements of a vector, or of two, by their positions."""
        mask = self.ir.Constant(self.ir.VectorType(self.int, len(order)), order)
        return self.at.shuffle_vector(a, a if b is None else b, mask)

    def word(self, state: Any, index: int, kind: Any = None) -> Any:
        return self.load(state, 8 * index, kind or self.long, 8)

    def call(self, name: str, kind: Any, *args: Any) -> Any:
        function = self.module.globals.get(name) or self.ir.Function(
            self.module, self.ir.FunctionType(kind, [arg.type for arg in args]), name
        )
        return self.at.call(function, args)

    def opaque(self, x: Any) -> Any:
        """A vector that LLVM does not see through; it takes no instruction."""
        kind = self.ir.FunctionType(x.type, [x.type])
        return self.at.asm(kind, "", "=x,0", [x], side_effect=False)

    def prefetch(self, pointer: Any, offset: Any) -> None:
        """Reads a line of memory into the cache, if the address is valid."""
        place, flags = self.offset(pointer, offset), map(self.int, (0, 3, 1))
        self.call("llvm.prefetch.p0", self.none, place, *flags)

    @contextlib.contextmanager
    def loop(self, start: Any, stop: Any, step: Any = 1) -> Iterator[Any]:
        """Runs its body with indices up to `stop`, at least once."""
        start, stop = self._as_long(start), self._as_long(stop)
        before = self.at.block
        body = self.at.append_basic_block("body")
        end = self.at.append_basic_block("end")
        self.at.branch(body)
        self.at.position_at_end(body)
        index = self.at.phi(self.long)
        index.add_incoming(start, before)
        yield index
        following = self.sum(index, step)
        index.add_incoming(following, self.at.block)
        is_more = self.at.icmp_signed("<", following, stop)
        self.at.cbranch(is_more, body, end)
        self.at.position_at_end(end)

    def if_any(self, start: Any, stop: Any) -> Any:
        """Runs its body if there are indices from `start` to `stop`."""
        start, stop = self._as_long(start), self._as_long(stop)
        return self.at.if_then(self.at.icmp_signed("<", start, stop))

    def _as_long(self, x: Any) -> Any:
        return self.long(x) if isinstance(x, int) else x

    # What XLA gives.

    def argument(self, frame: Any, index: int) -> Any:
        array = self.load(frame, _ARGUMENTS, self.pointer)
        return self.load(array, 8 * index, self.pointer)

    def result(self, frame: Any, index: int = 0) -> Any:
        array = self.load(frame, _RESULTS, self.pointer)
        return self.load(array, 8 * index, self.pointer)

    def attribute_count(self, frame: Any) -> Any:
        """The number of attributes of a call."""
        return self.load(frame, _ATTRIBUTES, self.long)

    def data(self, buffer: Any) -> Any:
        return self.load(buffer, _DATA, self.pointer)

    def rank(self, buffer: Any) -> Any:
        return self.load(buffer, _RANK, self.long)

    def size(self, buffer: Any, axis: Any) -> Any:
        sizes = self.load(buffer, _SIZES, self.pointer)
        return self.load(sizes, self.times(axis, 8), self.long)

    def _function(self, api: Any, name: str) -> Any:
        names = re.findall(r"API_STRUCT_FIELD\(XLA_FFI_(\w+)\)", _header())
        offset = _FUNCTIONS + 8 * names.index(name)
        return self.load(api, offset, self.pointer)

    def _ask(self, api: Any, name: str, *values: Any) -> tuple[Any, Any]:
        """Calls a function of XLA's with its structure of arguments, and returns both.

        None leaves the place of a value that XLA sets.
        """
        args = self.array(self.long, 2 + len(values))
        self.store(self.long(8 * (2 + len(values))), args, 0)
        self.store(self.null, args, 8)
        for i, value in enumerate(values):
            self.store(value, args, 16 + 8 * i)
        kind = self.ir.FunctionType(self.pointer, [self.pointer])
        function = self._cast(self._function(api, name), kind.as_pointer())
        return self.at.call(function, [args]), args

    # The handler, and the work of its threads.

    @property
    def _shared(self) -> dict[str, int]:
        """Offsets of the words of a state that threads share."""
        names = ("next", "left", "users", "chunk", "columns", "api", "future")
        return {name: 8 * (self.words + i) for i, name in enumerate(names)}

    def _handle(self, frame: Any, part: Any, work: Any) -> None:
        extension = self.load(frame, _EXTENSION, self.pointer)
        # XLA asks for metadata once, by a frame with such an extension.
        with self.at.if_then(self.at.icmp_unsigned("!=", extension, self.null)):
            metadata = self.load(extension, _METADATA, self.pointer)
            for i, value in enumerate((*_version(_header())[:2], 0)):
                self.store(self.int(value), metadata, _VERSION + 4 * i)
            self.at.ret(self.null)
        at, shared = self.at, self._shared
        size = 8 * (self.words + len(shared))
        asked = self.sum(self.memory(frame), size)
        state = self.call("malloc", self.pointer, asked)
        columns, each = self.prepare(frame, state, self.offset(state, size))
        api = self.load(frame, _API, self.pointer)
        context = self.load(frame, _CONTEXT, self.pointer)
        threads = self.array(self.long, 1)
        self.store(self.long(1), threads, 0)
        self._ask(api, "ThreadPool_NumThreads", context, threads)
        # Some times as many chunks as threads, of whole vectors, and not too small.
        count = self.load(threads, 0, self.long)
        chunk = at.sdiv(self.long(_WORK), self.sum(each, 1))
        fair = at.sdiv(columns, self.times(count, 4))
        chunk = at.select(at.icmp_signed("<", chunk, fair), fair, chunk)
        chunk = at.and_(self.sum(chunk, _VECTOR), self.long(-_VECTOR))
        chunks = at.sdiv(at.sub(self.sum(columns, chunk), self.long(1)), chunk)
        users = self.least(count, chunks)
        with at.if_then(at.icmp_signed("<=", users, self.long(1))):
            at.call(part, [state, self.long(0), columns])
            self.call("free", self.none, state)
            at.ret(self.null)
        _, made = self._ask(api, "Future_Create", self.null)
        future = self.load(made, 16, self.pointer)
        self.store(future, frame, _FUTURE)
        values = (self.long(0), chunks, users, chunk, columns, api, future)
        for offset, value in zip(shared.values(), values, strict=True):
            self.store(value, state, offset, 8)
        with self.loop(1, users):
            task = self._cast(work, self.pointer)
            error, _ = self._ask(api, "ThreadPool_Schedule", context, task, state)
            with at.if_then(at.icmp_unsigned("!=", error, self.null)):
                at.call(work, [state])
        at.call(work, [state])
        at.ret(self.null)

    def _work(self, state: Any, part: Any) -> None:
        """Computes chunks until none are left; the last thread frees the state."""
        at, shared = self.at, self._shared
        chunk, columns = (
            self.load(state, shared[name], self.long, 8)
            for name in ("chunk", "columns")
        )
        ask, found, end = (at.append_basic_block() for _ in range(3))
        at.branch(ask)
        at.position_at_end(ask)
        start = self.times(self._added(state, "next", 1), chunk)
        at.cbranch(at.icmp_signed("<", start, columns), found, end)
        at.position_at_end(found)
        at.call(part, [state, start, self.least(self.sum(start, chunk), columns)])
        left = self._added(state, "left", -1)
        with at.if_then(at.icmp_signed("==", left, self.long(1))):
            api, future = (
                self.load(state, shared[name], self.pointer, 8)
                for name in ("api", "future")
            )
            self._ask(api, "Future_SetAvailable", future)
        at.branch(ask)
        at.position_at_end(end)
        users = self._added(state, "users", -1)
        with at.if_then(at.icmp_signed("==", users, self.long(1))):
            self.call("free", self.none, state)
        at.ret_void()

    def _added(self, state: Any, name: str, value: int) -> Any:
        """Adds to a word that threads share, and returns what it was before."""
        where = self.offset(state, self._shared[name])
        return self.at.atomic_rmw("add", where, self.long(value), "acq_rel")


_VECTOR = 16
"""Number of columns that are computed at a time; a chunk has a multiple."""
