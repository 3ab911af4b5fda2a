"""Models of Flax where functions are wanted, without importing Flax."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from aqtlite import errors
from aqtlite.jaxpr import module_scopes, tracing
from aqtlite.qtensor.qtensor import QTensor


def is_nnx(fn: Any) -> bool:
    """Whether an object is an NNX module."""
    # Where Flax has not been imported, which takes a while, there is no such model.
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(fn, nnx.Module)


def unboxed(tree: Any) -> Any:
    """Returns variables without what Linen keeps of their axes, as for partitioning."""
    linen = sys.modules.get("flax.linen")
    return tree if linen is None else linen.meta.unbox(tree)


def check_can_be_planned(fn: Any, args: tuple[Any, ...]) -> None:
    """Checks that a model of Flax is one that `plan` takes, with its variables.

    Args:
        fn: a function or a model.
        args: its arguments.

    Raises:
        TypeError: if not.
    """
    if is_nnx(fn):
        raise TypeError(
            f"aqtlite.plan takes functions and Linen models, got the NNX model "
            f"{type(fn).__name__}: aqtlite.flax.nnx.plan(quantize_model(model, rules), "
            "*args) takes those of NNX"
        )
    check_variables(fn, args, "plan")


def check_variables(fn: Any, args: tuple[Any, ...], caller: str) -> None:
    """Checks that the first argument of a Linen model is its variables.

    Args:
        fn: a function or a model.
        args: its arguments.
        caller: name of the function of `aqtlite` that they were given to.

    Raises:
        TypeError: if not.
    """
    linen = sys.modules.get("flax.linen")
    is_linen = linen is not None and isinstance(fn, linen.Module)
    if is_linen and not (args and isinstance(args[0], Mapping)):
        raise TypeError(
            f"aqtlite.{caller} takes the variables of a Linen model, or their shapes, "
            f"before its arguments: {caller}({type(fn).__name__}(...), variables, "
            "*args, ...)"
        )


def trace(function: Callable[..., Any], args: tuple[Any, ...]) -> tracing.Traced:
    """Traces a function, as `tracing.trace`, with marks of the modules in it.

    Args:
        function: function that returns a pytree of arrays.
        args: its arguments.

    Raises:
        TypeError: if it computes with a `QTensor`, naming those of the arguments.
    """
    try:
        with marking_modules():
            return tracing.trace(function, args)
    except errors.NoArithmeticError as error:
        quantized = _quantized_in(args)
        if not quantized:
            raise
        raise TypeError(
            f"{', '.join(quantized[:3])}{', ...' * (len(quantized) > 3)} in the "
            "arguments is quantized, as in a checkpoint that load_quantized read, and "
            "the call computes with floats. Convert the model with these parameters "
            "first, which keeps their integers, and call it with the result: "
            "aqtlite.flax.convert(model, variables, *args), aqtlite.flax.nnx.convert("
            "model, *args) or aqtlite.convert_function(fn_q, params, *args). To "
            "compute with floats, give q.dequant() in place of each"
        ) from error


def _quantized_in(args: tuple[Any, ...]) -> list[str]:
    """Describes the `QTensor`s among arguments by their paths."""
    leaves = jax.tree.leaves_with_path(args, is_leaf=_is_quantized)
    names = {
        jax.tree_util.keystr(path, simple=True, separator="/"): one.shape
        for path, one in leaves
        if _is_quantized(one)
    }
    return [f"{name.removeprefix('0/')} {shape}" for name, shape in names.items()]


def _is_quantized(x: Any) -> bool:
    return isinstance(x, QTensor)


@contextlib.contextmanager
def marking_modules() -> Iterator[None]:
    """Lets the modules of Linen in a traced function mark their equations."""
    linen = sys.modules.get("flax.linen")
    with contextlib.ExitStack() as contexts:
        contexts.enter_context(module_scopes.marking())
        if linen is not None:
            contexts.enter_context(linen.intercept_methods(_in_module))
        yield


def _in_module(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Calls a method of a module of Linen."""
    module = context.module
    if module.scope is None:
        return call(*args, **kwargs)
    path = module.path
    root = "" if path else module.name or type(module).__name__
    with contextlib.ExitStack() as contexts:
        contexts.enter_context(module_scopes.entering(module_scopes.Module(root, path)))
        if "flax.nnx" in sys.modules:  # As in `is_nnx`.
            from aqtlite.program.modules import marked_modules

            contexts.enter_context(marked_modules.marking_inside(module))
        return call(*args, **kwargs)
