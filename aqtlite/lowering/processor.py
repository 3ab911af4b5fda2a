"""The processor's instructions for narrow numbers."""

import functools
import pathlib


@functools.cache
def multiplies_unsigned() -> bool:
    """Returns True if XLA:CPU multiplies uint8 by int8 faster than int8 by int8.

    This is the case with AVX512-VNNI, which takes one unsigned operand (Intel,
    "vpdpbusd"), unless there is AMX, which takes signed ones, too. Detected on Linux;
    False elsewhere.
    """
    return reads_as_unsigned(pathlib.Path("/proc/cpuinfo"))


def reads_as_unsigned(cpuinfo: pathlib.Path) -> bool:
    """Decides `multiplies_unsigned` from a file like Linux's ``/proc/cpuinfo``."""
    flags = _flags(cpuinfo)
    return "avx512_vnni" in flags and "amx_int8" not in flags


@functools.cache
def multiplies_bfloat16() -> bool:
    """Returns True if XLA:CPU multiplies bfloat16 faster than float32.

    This is the case with AVX512-BF16 ("vdpbf16ps", two products to a float32 sum) or
    AMX. Detected on Linux; False elsewhere.
    """
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(
        _flags(pathlib.Path("/proc/cpuinfo"))
    )


def _flags(cpuinfo: pathlib.Path) -> set[str]:
    """The processor flags in a file like Linux's ``/proc/cpuinfo``, if it exists."""
    if not cpuinfo.exists():
        return set()
    return {
        flag
        for line in cpuinfo.read_text().splitlines()
        if line.startswith("flags")
        for flag in line.partition(":")[2].split()
    }
