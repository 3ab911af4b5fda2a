"""The allocator setting under which the benchmarks run."""

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
    """Starts the running program again with glibc told to keep its memory.

    glibc reads the setting at start only; without it, page faults would be half of what
    is measured. Does nothing where it is in effect.

    Args:
        module: what ``python -m`` ran.
        arguments: of the command line; by default what this process was given.
    """
    if all(os.environ.get(name) == value for name, value in _SETTING.items()):
        return
    given = sys.argv[1:] if arguments is None else arguments
    command = [sys.executable, "-m", module, *given]
    os.execve(sys.executable, command, {**os.environ, **_SETTING})
