"""The compiled program contracts what it should in few bits, and copies no weight."""

from typing import Any

import jax
import numpy as np

from aqtlite import errors
from aqtlite.program.modules import flax_models
from aqtlite.program.naming import Parameters
from aqtlite.reporting.contraction import NOT_FOUND, ReportedContraction, is_float
from aqtlite.reporting.report import Report, report


def assert_quantized(
    fn: Any,
    *args: Any,
    min_share: float = 0.99,
    params: Parameters = None,
    platform: str | None = None,
    **kwargs: Any,
) -> None:
    """Asserts that a compiled function contracts in integers or floats of 8 bits.

    Compiles the function, and runs nothing. Contractions that the compiler removed do
    not count.

    >>> import jax.numpy as jnp
    >>> from aqtlite import Rule, config, quantize_function
    >>> fn = quantize_function(jnp.matmul, Rule(cfg=config.fully_quantized()))
    >>> x, w = jnp.ones((8, 64)), jnp.ones((64, 32))
    >>> assert_quantized(fn, x, w)
    >>> assert_quantized(jnp.matmul, x, w)
    Traceback (most recent call last):
    ...
    AssertionError: 0.0% of the multiply-accumulates of matmul are quantized, less \
than 99.0%. In float:
      (no name scope) (forward, 'ab,bc->ac'): float32[8,64] x float32[64,32] in \
float32, 100.0%

    Args:
        fn: as for `aqtlite.report`: for training, the function with the gradient.
        *args: its arguments, or their shapes and dtypes.
        min_share: least share of the multiply-accumulates, from 0 to 1.
        params: as for `aqtlite.report`.
        platform: as for `aqtlite.report`.
        **kwargs: as `args`.

    Raises:
        AssertionError: if fewer are quantized; the message names the contractions in
            float.
        TypeError: if `fn` is no function or model.
        ValueError: if the function contracts nothing, or an argument is unknown.
    """
    if not 0 <= min_share <= 1:
        raise ValueError(f"min_share must be between 0 and 1, got {min_share}")
    found = report(fn, *args, params=params, platform=platform, **kwargs)
    shares = {x: n for x, n in found.shares.items() if x != NOT_FOUND}
    unknown = [one for one in found.contractions if one.macs is None]
    total = sum(shares.values())
    if not total and not unknown:
        raise ValueError(
            f"the compiled program of {found.name} contracts nothing, so that nothing "
            "can be quantized"
        )
    quantized = sum(part for x, part in shares.items() if not is_float(x))
    share = quantized / total if total else 0.0
    left = [one for one in found.contractions if one.is_float]
    if share < min_share or (unknown and min_share == 1):
        lines = "\n".join(f"  {_described(found, one)}" for one in left)
        raise AssertionError(
            f"{share:.1%} of the multiply-accumulates of {found.name} are quantized, "
            f"less than {min_share:.1%}. In float:\n{lines}"
        )


def _described(found: Report, one: ReportedContraction) -> str:
    share = "" if one.macs is None else f", {found.share_of(one):.1%}"
    asked = f" for {one.asked}" if one.fell_back else ""
    why = f" ({one.why_float})" if one.why_float else ""
    operands = " x ".join(filter(None, (one.lhs, one.rhs)))
    return (
        f"{errors.label(one.path)} ({one.role}, {one.equation or one.op!r}): "
        f"{operands} in {one.runs_in}{asked}{share}{why}"
    )


def _is_narrow(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    # Random keys have a dtype of JAX's own.
    return isinstance(dtype, np.dtype) and dtype.itemsize == 1 and dtype.kind != "b"


def assert_no_float_copy(fn: Any, *args: Any, **kwargs: Any) -> None:
    """Asserts that a compiled function makes no float copy of a frozen weight.

    A copy is a value in memory, not inside of a loop over elements that a compiler
    fused, of the size of an argument of at most 8 bits and made of it. It takes more
    memory than the float weight did.

    >>> import jax.numpy as jnp
    >>> def served(w, scale, x):
    ...     return x @ (w.astype(jnp.float32) * scale)
    >>> w, scale = jnp.ones((64, 32), jnp.int8), jnp.ones(32)
    >>> assert_no_float_copy(served, w, scale, jnp.ones((8, 64)))
    Traceback (most recent call last):
    ...
    AssertionError: the compiled program of served makes 1 float copies of arguments:
      w as float32[64,32], 8192 bytes

    Args:
        fn: as for `aqtlite.report`.
        *args: its arguments, or their shapes and dtypes: frozen weights are some.
        **kwargs: as `args`.

    Raises:
        AssertionError: if there is one; the message names the arguments and layers.
        TypeError: if `fn` is no function or model.
        ValueError: if no argument has at most 8 bits, or a platform is given, for which
            nothing is compiled.
    """
    if kwargs.get("platform") is not None:
        raise ValueError(
            "copies are seen in compiled programs, and none is compiled with "
            f"platform={kwargs['platform']!r}: leave it out"
        )
    found = report(fn, *args, **kwargs)
    model = fn if flax_models.is_nnx(fn) else None
    if not any(map(_is_narrow, jax.tree.leaves((model, args, kwargs)))):
        raise ValueError(
            f"no argument of {found.name} has at most 8 bits, so that there is nothing "
            "to copy in float: give the frozen weights, as a conversion for serving "
            "returns them, as arguments"
        )
    made = [one for one in found.copies if one.kind == "float copy"]
    if made:
        lines = [
            f"  {one.argument} as {one.type}, {one.bytes} bytes"
            + (f", in {one.path}" if one.path else "")
            for one in made
        ]
        raise AssertionError(
            f"the compiled program of {found.name} makes {len(made)} float copies of "
            "arguments:\n" + "\n".join(lines)
        )
