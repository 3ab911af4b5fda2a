"""The allocator setting under which the benchmarks run."""

import os
import sys

_SETTING = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
}


def keep_memory(module: str) -> None:
    """Starts the running program again with glibc told to keep its memory.

    glibc reads the setting at start only; without it, page faults would be half of what
    is measured. Does nothing where it is in effect.
    """
    if all(os.environ.get(name) == value for name, value in _SETTING.items()):
        return
    command = [sys.executable, "-m", module, *sys.argv[1:]]
    os.execve(sys.executable, command, {**os.environ, **_SETTING})
