"""The processor's instructions for narrow numbers."""

import functools
import pathlib

import jax

TPUS_THAT_READ_ROWS = ("TPU v5 lite", "TPU v5", "TPU v5e", "TPU v5p")
"""Kinds of TPUs, as `jax.Device.device_kind` and the public names call them."""


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


@functools.cache
def tpu_reads_rows() -> bool:
    """Returns True if the TPU multiplies int8 slower where lhs is not read by rows.

    v5e and v5p do (`aqtlite.lowering.tpu`). False without a TPU in this process, where
    a program is compiled ahead of time for an unknown one.
    """
    if jax.default_backend() != "tpu":
        return False
    return jax.devices()[0].device_kind in TPUS_THAT_READ_ROWS


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
