"""Contractions marked with configs of their own, which take precedence over rules.

An injected function (`aqtlite.flax.nnx.AqtDotGeneral`) usually quantizes by itself.
Inside a model quantized by rules it contracts floats instead, and marks the contraction
with its config, so that both kinds share one plan, one state and one conversion.
"""

import contextlib
import re
import threading
from collections.abc import Iterator

import jax

from aqtlite import config

# A user context is part of JAX's cache keys, so traces with and without it stay apart.
_is_marked = jax.make_user_context(default_value=False)

_MARK = re.compile(r"aqtlite_config_(\d+)")

_configs: dict[config.DotGeneral, int] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """Lets injected functions contract floats and mark the contractions."""
    with _is_marked(True):
        yield


def is_marking() -> bool:
    """Whether `marking` is in effect."""
    return bool(_is_marked.value)


def mark(cfg: config.DotGeneral) -> contextlib.AbstractContextManager[None]:
    """Returns the name scope that marks contractions with a config."""
    with _lock:
        number = _configs.setdefault(cfg, len(_configs))
    return jax.named_scope(f"aqtlite_config_{number}")


def config_of(scope: str) -> config.DotGeneral | None:
    """Returns the config in the mark of a name scope, or None."""
    found = _MARK.findall(scope)
    return list(_configs)[int(found[-1])] if found else None


def without_mark(scope: str) -> str:
    """Returns a name scope without marks."""
    return "/".join(name for name in scope.split("/") if not _MARK.fullmatch(name))
