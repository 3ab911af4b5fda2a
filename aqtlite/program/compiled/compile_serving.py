"""Serving programs: compiled once, with variables flattened and packed once."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from aqtlite import errors
from aqtlite.lowering.target import Target
from aqtlite.program.compiled import merged, packed, undivided
from aqtlite.program.serving.placeholder import without_markers

# JAX 0.10 sets its flags where type checkers do not see them.
_jax_config: Any = jax.config


@dataclasses.dataclass(frozen=True, eq=False)
class ServingProgram:
    """A compiled function with its serving variables, from `compile_serving`.

    Call it with the arguments after the variables, in the shapes and dtypes it was
    compiled for. Like every compiled program, it runs outside of functions that JAX
    transforms. It equals no other one.
    """

    compiled: jax.stages.Compiled
    """Compiled program, with analyses such as ``compiled.memory_analysis()``. It takes
    the variables, as they are packed, before the arguments."""

    _variables: Any = dataclasses.field(repr=False)
    """Arrays that the program takes first."""

    _jitted: Any = dataclasses.field(repr=False)
    """The function of all leaves of the serving variables, and of the arguments."""

    _shapes: tuple[tuple[Any, ...], dict[str, Any]] = dataclasses.field(repr=False)
    """Shapes of its positional and keyword arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            if not _jax_config.jax_disable_jit:
                return self.compiled(self._variables, *args, **kwargs)
            with jax.disable_jit(False):  # Compiled programs refuse to run without.
                return self.compiled(self._variables, *args, **kwargs)
        except TypeError as error:
            (_, *shapes), named = self._shapes
            listed = [
                *map(errors.brief, shapes),
                *(f"{name}={errors.brief(one)}" for name, one in named.items()),
            ]
            error.add_note(
                f"compile_serving compiled this program for ({', '.join(listed)}): "
                "call compile_serving for each call of other shapes, dtypes or keywords"
            )
            raise

    def export(self, platforms: Sequence[str] | None = None) -> export.Exported:
        """Exports the program with `jax.export`, to run without aqtlite.

        Args:
            platforms: platforms to lower it for, such as ``["cpu", "cuda"]``; None for
                the current one.

        Returns:
            A program of ``(leaves, *args)``, where `leaves` is
            ``tuple(jax.tree.leaves(serving))``. The export does not contain these
            arrays.

        Raises:
            TypeError: if `platforms` is no list of names.
            ValueError: if one of them is no platform of JAX, or there is none.
        """
        if platforms is not None:
            _check_platforms(platforms)
        args, kwargs = self._shapes
        return export.export(self._jitted, platforms=platforms)(*args, **kwargs)


def compile_serving(
    function: Callable[..., Any],
    serving: Any,
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    **kwargs: Any,
) -> ServingProgram:
    """Compiles a function of serving variables for calls with little Python overhead.

    `jax.jit` flattens the tree of variables at every call, which takes tens of
    microseconds for models with many layers, as long as a token of a small model. This
    flattens it once.

    On a CPU it also packs int8 and int4 weights where that makes calls faster, and on a
    GPU fp8 weights: it lays them out once, as the kernels read them, and the kernel of
    the extra ``cpu`` rounds the rows that it multiplies. Results stay equal, bit for
    bit. The program keeps the packed weights in place of those of `serving`, in the
    same memory; both exist for as long as the caller keeps `serving`. And it keeps
    XLA:CPU from dividing loops among threads in programs whose loops are small (arrays
    of up to 2^15 elements), which takes longer than running them on one. Small scales
    become one array there, as each argument takes time.

    >>> import flax.linen as nn
    >>> import jax.numpy as jnp
    >>> from aqtlite import config
    >>> from aqtlite.flax import AqtDotGeneral, convert
    >>> dense = nn.Dense(4, dot_general=AqtDotGeneral(config.fully_quantized()))
    >>> x = jnp.ones((2, 3))
    >>> serving = convert(dense, dense.init(jax.random.key(0), x), x)
    >>> program = compile_serving(dense.apply, serving, x)
    >>> bool((program(x) == jax.jit(dense.apply)(serving, x)).all())
    True

    Args:
        function: function called as ``function(serving, *args, **kwargs)``: the `apply`
            of a Linen model or of the result of `quantize_model`, the function that
            `convert_function` returned, or any function around them.
        serving: serving variables, a pytree of arrays.
        *args: its other arguments, or their shapes (`jax.ShapeDtypeStruct`).
        donate_argnums: argument or arguments of `function` to donate, such as a KV
            cache, numbered as in `jax.jit`; `serving`, number 0, cannot be donated.
        **kwargs: as `args`.

    Raises:
        TypeError: if `serving` holds anything but `jax.Array`.
        ValueError: if `donate_argnums` has number 0 or of no argument, if a shape is
            symbolic, if it is called in a function that JAX traces, if an int4 weight
            is on several CPU devices, or an int4 argument is committed to one.
    """
    donated = _donated(donate_argnums, 1 + len(args))
    _check_sizes(args, kwargs)
    every, structure = jax.tree.flatten(serving)
    # What is compiled is not differentiated, and each argument takes time.
    numbers = without_markers(jax.tree.unflatten(structure, range(len(every))))
    kept, structure = jax.tree.flatten(numbers)
    leaves = [every[i] for i in kept]
    _check_concrete((*leaves, jnp.zeros(()), args, kwargs))
    for leaf in leaves:
        if not isinstance(leaf, jax.Array):
            raise TypeError(
                "compile_serving takes serving variables that are jax.Array, got "
                f"{type(leaf).__name__} among them: jax.device_put the variables first"
            )
        _check_places(leaf)
    for x in jax.tree.leaves((args, kwargs)):
        _check_argument(x)
    leaves = [_uncommitted(x) if _is_refused(x) else x for x in leaves]

    def run(leaves: tuple[jax.Array, ...], *args: Any, **kwargs: Any) -> Any:
        return function(jax.tree.unflatten(structure, leaves), *args, **kwargs)

    def run_all(every: tuple[jax.Array, ...], *args: Any, **kwargs: Any) -> Any:
        return run(tuple(every[i] for i in kept), *args, **kwargs)

    jitted = jax.jit(run, donate_argnums=donated)
    given: Any = tuple(leaves)
    shapes_of_args = jax.tree.map(_shape_of, (tuple(every), *args))
    shapes = shapes_of_args, jax.tree.map(_shape_of, kwargs)
    with jax.disable_jit(False):
        traced = jitted.trace(given, *args, **kwargs)
        on = _one_device(given, args, kwargs)
        is_on_cpu = on is not None and on.platform == "cpu"
        found = None
        if on is not None:
            scales = merged.scales(jax.tree.unflatten(structure, leaves))
            found = packed.pack(traced.jaxpr, given, on, scales)
        if found is not None:
            given = found.variables
            function_of_packed = _with_structure(found, traced)
            traced = jax.jit(function_of_packed, donate_argnums=donated).trace(
                given, *args, **kwargs
            )
        options = undivided.options_for(traced.jaxpr) if is_on_cpu else {}
        compiled = traced.lower().compile(compiler_options=options)
    of_all = jax.jit(run_all, donate_argnums=donated)
    return ServingProgram(compiled, given, of_all, shapes)


_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
"""Those that `jax.export` documents; a plugin may add that of its devices."""


def _check_platforms(platforms: Sequence[str]) -> None:
    """Raises where `jax.export` writes a program that nothing runs."""
    if isinstance(platforms, str) or not isinstance(platforms, Sequence):
        raise TypeError(f"platforms is a list of names, got {platforms!r}")
    known = dict.fromkeys((*_PLATFORMS, export.default_export_platform()))
    listed = ", ".join(map(repr, known))
    if not platforms:
        raise ValueError(f"platforms is empty: None is the current one, of {listed}")
    for name in platforms:
        if name not in known:
            raise ValueError(f"no platform {name!r} is known, only {listed}")


def _donated(argnums: int | Sequence[int], count: int) -> list[int]:
    """Returns the numbers of arguments to donate, counted from the first one.

    Args:
        argnums: the numbers as given; negative ones count from the last.
        count: number of positional arguments, with the serving variables.
    """
    found = []
    for number in [argnums] if isinstance(argnums, int) else argnums:
        if not -count <= number < count:
            raise ValueError(
                f"donate_argnums names {number}, and there are {count} positional "
                "arguments, the serving variables among them"
            )
        found.append(number % count)
    if 0 in found:
        raise ValueError(
            f"donate_argnums={argnums!r} names the serving variables, argument 0: "
            "later calls need them"
        )
    return found


def _check_sizes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError for shapes that `jax.export` leaves open."""
    for x in jax.tree.leaves((args, kwargs)):
        if not all(isinstance(n, int) for n in jnp.shape(x)):
            raise ValueError(
                f"compile_serving got an argument of the symbolic shape {x.shape}: "
                "compile for each size, or export the function by jax.export"
            )


def _check_concrete(values: Any) -> None:
    """Raises ValueError where weights or arguments are those of a traced function."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(values)):
        raise ValueError(
            "compile_serving was called in a function that JAX traces, such as that of "
            "jax.jit or jax.vmap: call it outside, with arrays"
        )


def _is_refused(x: Any) -> bool:
    """Whether compiled programs refuse an array for its layout, though it has theirs.

    JAX 0.10 and 0.12 compare layouts of arrays that are committed to a device, and
    report those of int4 arrays on CPUs without the bits of an element.
    """
    return (
        isinstance(x, jax.Array)
        and x.dtype in (jnp.int4, jnp.uint4)
        and x.committed
        and all(one.platform == "cpu" for one in x.devices())
    )


def _uncommitted(x: jax.Array) -> jax.Array:
    """Returns an array of one device without its commitment to that device."""
    (device,) = x.devices()
    with jax.default_device(device):
        return jnp.asarray(np.asarray(x))


def _check_argument(x: Any) -> None:
    """Raises ValueError for an array that the program would refuse at every call."""
    if _is_refused(x):
        raise ValueError(
            f"compile_serving got an argument of {jax.typeof(x).str_short()} that is "
            "committed to a CPU device, which compiled programs of JAX do not take: "
            "make it by jnp.zeros or jnp.asarray(np.asarray(x)) in place of "
            "jax.device_put to a device, or hold it in int8"
        )


def _check_places(leaf: jax.Array) -> None:
    """Raises ValueError for int4 on several CPU devices.

    Compiled programs of JAX 0.10 and 0.12 refuse such arrays when they are called.
    """
    devices = leaf.devices()
    is_on_cpus = len(devices) > 1 and all(one.platform == "cpu" for one in devices)
    if is_on_cpus and leaf.dtype in (jnp.int4, jnp.uint4):
        raise ValueError(
            f"compile_serving got a weight of {jax.typeof(leaf).str_short()} on "
            f"{len(devices)} CPU devices, which compiled programs of JAX do not take: "
            "call jax.jit(function), or widen the weights to int8 by "
            "aqtlite.flax.widen_int4(serving)"
        )


def _with_structure(
    call: packed.PackedCall, traced: jax.stages.Traced
) -> Callable[..., Any]:
    """Returns a packed call as a function of trees, as it was before it was traced."""
    outputs = jax.tree.structure(traced.out_info)

    def run(variables: Any, *args: Any, **kwargs: Any) -> Any:
        results = call.function(variables, jax.tree.leaves((args, kwargs)))
        return jax.tree.unflatten(outputs, results)

    return run


def _one_device(*arguments: Any) -> Target | None:
    """The CPU or GPU that arguments are on, if it is one; it sees whole arrays."""
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(arguments)]
    devices = {d for one in shardings if one is not None for d in one.device_set}
    if len(devices) != 1:
        return None
    # JAX names CUDA's devices and ROCm's alike, and both have the same forms.
    platform = {"cpu": "cpu", "gpu": "cuda"}.get(next(iter(devices)).platform)
    return None if platform is None else Target(platform, partitions=1)


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and sharding of an argument.

    Arrays that are not committed to a device go wherever the others are.
    """
    aval = jax.typeof(x) if not isinstance(x, jax.ShapeDtypeStruct) else x
    goes_anywhere = not getattr(x, "committed", True)
    return jax.ShapeDtypeStruct(
        aval.shape,
        aval.dtype,
        sharding=None if goes_anywhere else getattr(x, "sharding", None),
        weak_type=aval.weak_type,
    )
