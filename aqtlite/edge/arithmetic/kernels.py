"""The implementations of LiteRT's operators that are simulated."""

from typing import Any, Literal, get_args

Kernels = Literal["xnnpack", "builtin", "reference"]
"""Those of the interpreter's resolvers.

"xnnpack" is the default, with TFLite's optimized kernels for what XNNPACK does not run;
"builtin" TFLite's optimized kernels alone (``BUILTIN_WITHOUT_DEFAULT_DELEGATES``);
"reference" its reference kernels (``BUILTIN_REF``).
"""


def check_kernels(kernels: Any) -> None:
    """Checks that kernels are named.

    Raises:
        ValueError: if not.
    """
    if kernels not in get_args(Kernels):
        raise ValueError(
            f"kernels must be one of {', '.join(get_args(Kernels))}, got {kernels!r}"
        )
