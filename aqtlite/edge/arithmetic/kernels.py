"""The sets of LiteRT kernels that can be simulated."""

from typing import Any, Literal, get_args

Kernels = Literal["xnnpack", "builtin", "reference"]
"""LiteRT kernels, as the interpreter's resolvers select them.

"xnnpack", the default: XNNPACK, with TFLite's optimized kernels for what it does not
run. "builtin": TFLite's optimized kernels only (``BUILTIN_WITHOUT_DEFAULT_DELEGATES``).
"reference": TFLite's reference kernels (``BUILTIN_REF``).
"""


def check_kernels(kernels: Any) -> None:
    """Checks that an argument is one of `Kernels`.

    Raises:
        ValueError: if it is not.
    """
    if kernels not in get_args(Kernels):
        raise ValueError(
            f"kernels must be one of {', '.join(get_args(Kernels))}, got {kernels!r}"
        )
