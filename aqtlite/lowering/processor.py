"""The int8 instructions of the processor of this host."""

import functools
import pathlib


@functools.cache
def multiplies_unsigned() -> bool:
    """Returns True if XLA:CPU multiplies uint8 by int8 faster than int8 by int8.

    So it is with AVX512-VNNI, whose instruction for it takes one unsigned operand
    (Intel, "vpdpbusd"), unless there is AMX, which takes both. Known on Linux; False
    elsewhere.
    """
    return reads_as_unsigned(pathlib.Path("/proc/cpuinfo"))


def reads_as_unsigned(cpuinfo: pathlib.Path) -> bool:
    """Decides `multiplies_unsigned` from a file like Linux's ``/proc/cpuinfo``."""
    if not cpuinfo.exists():
        return False
    flags = {
        flag
        for line in cpuinfo.read_text().splitlines()
        if line.startswith("flags")
        for flag in line.partition(":")[2].split()
    }
    return "avx512_vnni" in flags and "amx_int8" not in flags
