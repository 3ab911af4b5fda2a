"""Contractions marked with configs of their own, which take precedence over rules.

An injected function (`aqtlite.flax.nnx.AqtDotGeneral`) usually quantizes by itself.
Inside a model quantized by rules it contracts floats instead, and marks the contraction
with its config, so that both kinds share one plan, one state and one conversion. The
injected functions of Linen always quantize by themselves, and mark contractions only
for the plan of a model.
"""

import contextlib
import re
import threading
from collections.abc import Iterator

import jax

from aqtlite import config

# A user context is part of JAX's cache keys, so traces with and without it stay apart.
_is_marked = jax.make_user_context(default_value=False)

_MARK = re.compile(r"aqtlite_(?:config|described)_(\d+)")
_DESCRIBED = re.compile(r"\baqtlite_described_")

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
    """Returns the name scope of a contraction to be quantized with a config."""
    return jax.named_scope(f"aqtlite_config_{_number(cfg)}")


def describe(cfg: config.DotGeneral) -> contextlib.AbstractContextManager[None]:
    """Returns the name scope of a contraction that quantizes by itself with a config.

    The program with this scope is planned, and never evaluated.
    """
    return jax.named_scope(f"aqtlite_described_{_number(cfg)}")


def _number(cfg: config.DotGeneral) -> int:
    with _lock:
        return _configs.setdefault(cfg, len(_configs))


def config_of(scope: str) -> config.DotGeneral | None:
    """Returns the config in the mark of a name scope, or None."""
    found = _MARK.findall(scope)
    return list(_configs)[int(found[-1])] if found else None


def is_described(scope: str) -> bool:
    """Whether a name scope is of a contraction that quantizes by itself."""
    return _DESCRIBED.search(scope) is not None


def without_mark(scope: str) -> str:
    """Returns a name scope without marks."""
    return "/".join(name for name in scope.split("/") if not _MARK.fullmatch(name))
