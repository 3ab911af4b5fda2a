"""Contractions that bring their configs along, for rules to leave them so.

A function that is injected into a layer (`aqtlite.flax.nnx.AqtDotGeneral`) quantizes on
its own. Inside of a model whose contractions are quantized by rules it contracts floats
instead, and marks the contraction with its config: so that what rules decide and what
is injected have one plan, one place for states, and one conversion.
"""

import contextlib
import re
import threading
from collections.abc import Iterator

import jax

from aqtlite import config

# What is traced while it is set is not taken for what is traced while it is not.
_is_marked = jax.make_user_context(default_value=False)

_MARK = re.compile(r"aqtlite_config_(\d+)")

_configs: dict[config.DotGeneral, int] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """Has what is injected contract floats, and mark the contractions."""
    with _is_marked(True):
        yield


def is_marking() -> bool:
    """Returns True inside of `marking`."""
    return bool(_is_marked.value)


def mark(cfg: config.DotGeneral) -> contextlib.AbstractContextManager[None]:
    """Returns the name scope that gives a contraction its config."""
    with _lock:
        number = _configs.setdefault(cfg, len(_configs))
    return jax.named_scope(f"aqtlite_config_{number}")


def config_of(scope: str) -> config.DotGeneral | None:
    """Returns the config that a name scope gives, if it gives one."""
    found = _MARK.findall(scope)
    return list(_configs)[int(found[-1])] if found else None


def without_mark(scope: str) -> str:
    """Returns a name scope without the config that it gives."""
    return "/".join(name for name in scope.split("/") if not _MARK.fullmatch(name))
