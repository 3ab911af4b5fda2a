"""The implementations of LiteRT's operators that are simulated."""

from typing import Literal

Kernels = Literal["xnnpack", "builtin", "reference"]
"""Those of the interpreter's resolvers.

"xnnpack" is the default, with TFLite's optimized kernels for what XNNPACK does not run;
"builtin" TFLite's optimized kernels alone (``BUILTIN_WITHOUT_DEFAULT_DELEGATES``);
"reference" its reference kernels (``BUILTIN_REF``).
"""
