"""Settings of glibc's allocator for the benchmarks."""

import os
import sys
from collections.abc import Sequence

_SETTING = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    # The heaps of further arenas hold 64 MiB at most: what is larger would be mapped.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TOP_PAD_": "1073741824",
}


def keep_memory(module: str, arguments: Sequence[str] | None = None) -> None:
    """Restart the program with settings that keep glibc from returning memory.

    glibc reads its settings at start only; without these, page faults would be half of
    the times measured. Return at once if they are in effect.

    Args:
        module: the module that ``python -m`` runs.
        arguments: of the command line; by default those of this process.
    """
    if all(os.environ.get(name) == value for name, value in _SETTING.items()):
        return
    given = sys.argv[1:] if arguments is None else arguments
    command = [sys.executable, "-m", module, *given]
    os.execve(sys.executable, command, {**os.environ, **_SETTING})
