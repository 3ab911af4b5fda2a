"""Serving programs: compiled once, with their variables flattened once."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import export


@dataclasses.dataclass(frozen=True)
class ServingProgram:
    """A compiled function with its serving variables; `compile_serving` makes one.

    It is called with the arguments that follow the variables, of the shapes and dtypes
    that it was compiled for.
    """

    compiled: jax.stages.Compiled
    """Its analyses tell bytes and operations (``compiled.memory_analysis()``)."""

    _jitted: Any = dataclasses.field(repr=False)
    _leaves: tuple[jax.Array, ...] = dataclasses.field(repr=False)
    _shapes: tuple[tuple[Any, ...], dict[str, Any]] = dataclasses.field(repr=False)
    """Of its arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(self._leaves, *args, **kwargs)

    def export(self, platforms: Sequence[str] | None = None) -> export.Exported:
        """Exports the program by `jax.export`, to run where aqtlite is not installed.

        Args:
            platforms: those to lower it for, such as ``["cpu", "cuda"]``; None for the
                current one.

        Returns:
            A program of ``(leaves, *args)``, where `leaves` is the tuple of arrays
            ``tuple(jax.tree.leaves(serving))``. It does not hold them.

        Raises:
            TypeError: if `platforms` is a string.
        """
        if isinstance(platforms, str):
            raise TypeError(f"platforms is a list of names, got {platforms!r}")
        args, kwargs = self._shapes
        exporting = export.export(self._jitted, platforms=platforms)
        return exporting(self._leaves, *args, **kwargs)


def compile_serving(
    function: Callable[..., Any],
    serving: Any,
    *args: Any,
    donate_argnums: Sequence[int] = (),
    **kwargs: Any,
) -> ServingProgram:
    """Compiles a function of serving variables, for calls that cost Python little.

    `jax.jit` flattens the tree of variables at every call, which takes tens of
    microseconds in models of many layers: as long as a token of a small one. Here that
    is done once.

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
        function: called as ``function(serving, *args, **kwargs)``: the `apply` of a
            Linen model or of what `quantize_model` made of one, what `convert_function`
            returned, or any function around them.
        serving: the variables that it serves, a pytree of arrays.
        *args: its other arguments, or their shapes (`jax.ShapeDtypeStruct`).
        donate_argnums: arguments of `function` whose memory the result may take, such
            as that of a KV cache; as for `jax.jit`, with `serving` as number 0, which
            stays.
        **kwargs: as `args`.

    Raises:
        TypeError: if `serving` holds anything but arrays.
        ValueError: if `donate_argnums` has number 0.
    """
    if 0 in donate_argnums:
        raise ValueError(
            "donate_argnums names 0, the serving variables: later calls need them"
        )
    leaves, structure = jax.tree.flatten(serving)
    for leaf in leaves:
        if not isinstance(leaf, jax.Array):
            raise TypeError(
                "compile_serving takes serving variables that are arrays, got "
                f"{type(leaf).__name__} among them"
            )

    def run(leaves: tuple[jax.Array, ...], *args: Any, **kwargs: Any) -> Any:
        return function(jax.tree.unflatten(structure, leaves), *args, **kwargs)

    jitted = jax.jit(run, donate_argnums=donate_argnums)
    arrays = tuple(leaves)
    compiled = jitted.lower(arrays, *args, **kwargs).compile()
    shapes = jax.eval_shape(lambda *given: given, args, kwargs)
    return ServingProgram(compiled, jitted, arrays, shapes)
