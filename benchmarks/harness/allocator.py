"""Settings of glibc's allocator for the benchmarks."""

import os
import sys
from collections.abc import Sequence

_SETTING = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    # Heaps of further arenas hold at most 64 MiB: larger arrays would be mapped.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TOP_PAD_": "1073741824",
}


def keep_memory(module: str, arguments: Sequence[str] | None = None) -> None:
    """Restart the program with settings that keep glibc from returning memory.

    Without them, page faults would be half of the measured times. glibc reads its
    settings only at startup. Does nothing if they are already in effect.

    Args:
        module: module to run with ``python -m``.
        arguments: command-line arguments; by default those of this process.
    """
    if all(os.environ.get(name) == value for name, value in _SETTING.items()):
        return
    given = sys.argv[1:] if arguments is None else arguments
    command = [sys.executable, "-m", module, *given]
    os.execve(sys.executable, command, {**os.environ, **_SETTING})
