"""Devices that need not be there, and the options with which programs are compiled."""

from collections.abc import Mapping, Sequence

import jax

from benchmarks.gpu.program import H100
from benchmarks.harness import absent

TOPOLOGIES = {16: "v5e:4x4", 64: "v5e:8x8", 256: "v5e:16x16"}
"""TPUs, by the number of chips."""

H100S = 8
"""H100s of a host."""

OPTIONS: Mapping[str, Mapping[str, str]] = {
    "tpu": {
        "xla_tpu_spmd_threshold_for_allgather_cse": "1000000",
        "xla_tpu_prefer_async_allgather_to_allreduce": "True",
    },
    "gpu": {
        "xla_gpu_autotune_level": "0",
        "xla_gpu_enable_triton_gemm": "False",
    },
    "cpu": {},
}
"""Options of XLA's compiler, by platform.

On TPUs, the forward and backward contractions of a layer share one gather of its
weights, whatever its megabytes, and gathers are not made all-reduces, which send twice
as much. On GPUs, nothing is timed on a device.
"""


def tpus(chips: int) -> Sequence[jax.Device]:
    """Chips of a TPU v5e (``pip install libtpu``)."""
    name = TOPOLOGIES[chips]
    missing = f"no topology {name!r} of tpu (see the docstring)"
    return absent.devices(name, "tpu", missing)


def h100s(hosts: int) -> Sequence[jax.Device]:
    """Hosts of eight H100s (for packages and JAX_PLATFORMS, see `gpu.program`)."""
    missing = "no topology 'h100' of cuda (see the docstring)"
    shape = f"1x{hosts}x{H100S}"
    return absent.devices("h100", "cuda", missing, target_config=H100, topology=shape)
