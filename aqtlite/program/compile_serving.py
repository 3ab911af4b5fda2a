"""Serving programs: compiled, and their variables flattened, only once."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import export


@dataclasses.dataclass(frozen=True)
class ServingProgram:
    """A compiled function with its serving variables, from `compile_serving`.

    Call it with the arguments after the variables, in the shapes and dtypes it was
    compiled for.
    """

    compiled: jax.stages.Compiled
    """Compiled program, with analyses such as ``compiled.memory_analysis()``."""

    _jitted: Any = dataclasses.field(repr=False)
    _leaves: tuple[jax.Array, ...] = dataclasses.field(repr=False)
    _shapes: tuple[tuple[Any, ...], dict[str, Any]] = dataclasses.field(repr=False)
    """Shapes of the positional and keyword arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(self._leaves, *args, **kwargs)

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
    """Compiles a function of serving variables for calls with little Python overhead.

    `jax.jit` flattens the tree of variables at every call, which takes tens of
    microseconds for models with many layers, as long as a token of a small model. This
    flattens it once.

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
        donate_argnums: arguments of `function` to donate, such as a KV cache, numbered
            as in `jax.jit`; `serving`, number 0, cannot be donated.
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
