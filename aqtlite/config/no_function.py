"""What is told to who gives a config for a function."""

import typing
from typing import Any, ClassVar, NoReturn


class NoFunction:
    """Refuses to be called, and names what is to be called instead."""

    if not typing.TYPE_CHECKING:  # It is nothing that type checkers may let pass.

        def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
            raise TypeError(
                f"a config.{type(self).__name__} was called as a function: give Flax "
                "layers AqtDotGeneral(cfg) of aqtlite.flax or aqtlite.flax.nnx, and "
                "what else takes a dot_general aqtlite.make_dot_general(cfg)"
            )

    nowrap: ClassVar[bool] = True
    """`flax.linen.nowrap`: a config that is an attribute of a Linen class without an
    annotation is no method, though it could be called."""
