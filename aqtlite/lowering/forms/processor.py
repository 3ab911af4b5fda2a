"""The processor's instructions for narrow numbers."""

import ctypes
import functools
import os
import pathlib
import re
from typing import Any

import jax

HAS_OLD_KERNELS = jax.__version_info__ < (0, 12)
"""Whether XLA:CPU is that of JAX before 0.12.

Its kernels do not use AVX512-VNNI for int8 by int8, however many rows there are, and
it divides products among threads that one thread computes in less time."""

# Newer ones multiply int8 by int8 as fast as uint8 by int8 from this number of rows on.
_MANY_ROWS = 17

_CPUINFO = pathlib.Path("/proc/cpuinfo")

# Numbers of Linux on x86-64: a call, ARCH_REQ_XCOMP_PERM, and XFEATURE_XTILEDATA.
_ARCH_PRCTL, _ASK_FOR_STATE, _AMX = 158, 0x1023, 18

_BEYOND = {
    "SSE4_2": ("avx", "amx"),
    "AVX": ("avx2", "avx_", "avx512", "amx"),
    "AVX2": ("avx512", "amx"),
    "AVX512": ("avx512_vnni", "avx512_bf16", "amx"),
    "AVX512_VNNI": ("avx512_bf16", "amx"),
    "AVX512_BF16": ("amx",),
}
"""Beginnings of the flags that XLA:CPU does not use, by the ``--xla_cpu_max_isa`` that
XLA_FLAGS may give."""

_BLACKWELL = 10

TPUS_THAT_READ_ROWS = ("TPU v5 lite", "TPU v5", "TPU v5e", "TPU v5p")
"""Kinds of TPUs, as `jax.Device.device_kind` and the public names call them."""


def multiplies_unsigned(rows: Any) -> bool:
    """Returns True if XLA:CPU multiplies uint8 by int8 faster than int8 by int8.

    This is the case with AVX512-VNNI, and with AVX-VNNI on clients' processors without
    AVX-512: they take one unsigned operand (Intel, "vpdpbusd"). Not if there is AMX,
    which takes signed ones, too; LLVM does not use AVX-VNNI-INT8, which would. Detected
    on Linux; False elsewhere.

    Args:
        rows: number of rows of the first operand, which may be symbolic (many).
    """
    has_few = isinstance(rows, int) and rows < _MANY_ROWS
    return has_unsigned_dots() and (has_few or HAS_OLD_KERNELS)


@functools.cache
def has_unsigned_dots() -> bool:
    """Whether the processor multiplies uint8 by int8, and not int8 by int8."""
    return reads_as_unsigned(_CPUINFO)


def reads_as_unsigned(cpuinfo: pathlib.Path) -> bool:
    """Whether only unsigned dots are fast, by a file like ``/proc/cpuinfo``."""
    flags = _flags(cpuinfo)
    return _has_vnni(flags) and "amx_int8" not in flags


@functools.cache
def multiplies_bytes() -> bool:
    """Returns True if the processor has AVX2. Detected on Linux; False elsewhere."""
    return "avx2" in _flags(_CPUINFO)


@functools.cache
def adds_products_of_bytes() -> bool:
    """Returns True if the processor adds four products of uint8 by int8 (VNNI)."""
    return _has_vnni(_flags(_CPUINFO))


@functools.cache
def has_avx512() -> bool:
    """Returns True if the processor has vectors of 512 bits of floats."""
    return "avx512f" in _flags(_CPUINFO)


@functools.cache
def has_avx512_vnni() -> bool:
    """Returns True if the processor adds such products in vectors of 512 bits.

    It looks up bytes in them, too.
    """
    return {"avx512_vnni", "avx512bw"} <= _flags(_CPUINFO)


@functools.cache
def may_use_amx() -> bool:
    """Returns True if this process may multiply int8 by AMX.

    Linux gives its registers to a process that asks for them, unless a thread has too
    little memory to save them ("Using XSTATE features in user space applications").
    """
    if not {"amx_int8", "amx_tile"} <= _flags(_CPUINFO):
        return False
    asked = map(ctypes.c_long, (_ARCH_PRCTL, _ASK_FOR_STATE, _AMX))
    return bool(ctypes.CDLL(None).syscall(*asked) == 0)


@functools.cache
def has_slow_dots_of_bytes() -> bool:
    """Returns True if int8 by int8 takes the time of float32 by float32, or more.

    This is the case with AVX2 alone, without VNNI or AMX. XLA:CPU has no faster form
    there (products of int16 take 1.5 times as long as those of float32); the kernel of
    `panel_products` is one.
    """
    flags = _flags(_CPUINFO)
    return "avx2" in flags and not _has_vnni(flags) and "amx_int8" not in flags


@functools.cache
def multiplies_bfloat16() -> bool:
    """Returns True if XLA:CPU multiplies bfloat16 faster than float32.

    This is the case with AVX512-BF16 ("vdpbf16ps", two products to a float32 sum) or
    AMX. Detected on Linux; False elsewhere.
    """
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(_flags(_CPUINFO))


@functools.cache
def tpu_reads_rows() -> bool:
    """Returns True if the TPU multiplies int8 slower where lhs is not read by rows.

    v5e and v5p do (`lowering.forms.tpu`). False without a TPU in this process, where
    a program is compiled ahead of time for an unknown one.
    """
    if jax.default_backend() != "tpu":
        return False
    return jax.devices()[0].device_kind in TPUS_THAT_READ_ROWS


@functools.cache
def gpu_scales_blocks() -> bool:
    """Returns True if the GPU multiplies floats with a scale per block.

    Those of NVIDIA do from Blackwell on (compute capability 10). True without a GPU in
    this process, where a program is compiled ahead of time for an unknown one: XLA
    gives an older one a product of float32.
    """
    if jax.default_backend() != "gpu":
        return True
    capability = getattr(jax.devices()[0], "compute_capability", "0")
    return int(str(capability).partition(".")[0]) >= _BLACKWELL


def _has_vnni(flags: set[str]) -> bool:
    return not {"avx512_vnni", "avx_vnni"}.isdisjoint(flags)


def is_within_limit(feature: str) -> bool:
    """Returns True if XLA:CPU may use a feature, as LLVM names it ("avx512vnni")."""
    return not feature.startswith(tuple(name.replace("_", "") for name in _beyond()))


def _beyond() -> tuple[str, ...]:
    limit = re.search(r"--xla_cpu_max_isa=(\w+)", os.environ.get("XLA_FLAGS", ""))
    return _BEYOND.get(limit[1].upper(), ()) if limit else ()


def _flags(cpuinfo: pathlib.Path) -> set[str]:
    """The flags of a file like Linux's ``/proc/cpuinfo`` that XLA:CPU may use.

    None if there is no such file.
    """
    if not cpuinfo.exists():
        return set()
    beyond = _beyond()
    return {
        flag
        for line in cpuinfo.read_text().splitlines()
        if line.startswith("flags")
        for flag in line.partition(":")[2].split()
        if not flag.startswith(beyond)
    }
