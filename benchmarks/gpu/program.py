"""Show XLA's kernels for the contractions of a training step on an H100.

    pip install jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
    JAX_PLATFORMS=cpu python -m benchmarks.gpu.program [--preset fp8]

Compiles forward + backward of one contraction for an H100, and prints the kernel of
every contraction. Nothing is run, so no GPU is needed. Triton's GEMMs are turned off,
because XLA would time them against cuBLASLt's on the device.
"""

import argparse
import os
import re
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import absent

# NVIDIA's H100 SXM as a GpuTargetConfigProto of XLA.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  device_memory_size: 84942979072
  runtime_version: "12.8.0" driver_version: "13.0.0" dnn_version: "9.10.0"
  compile_time_toolkit_version: "12.8.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
SHAPES = ((512, 1024), (8, 64, 1024), (500, 1000))
COLUMNS = 2048


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile for each shape of the activations, and print the kernels."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.program", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--preset", default="fp8")
    asked = parser.parse_args(arguments)
    # Must be set before JAX reads it.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
    from aqtlite import config

    missing = "no H100 to compile for (see the docstring)"
    options = {"target_config": H100, "topology": "1x1x1"}
    chip = absent.devices("h100", "cuda", missing, **options)[0]
    cfg = getattr(config, asked.preset)()
    for shape in SHAPES:
        print(f"{shape} by {(shape[-1], COLUMNS)}")
        for kernel in contractions(compile_step(cfg, shape, chip)):
            print(f"  {kernel}")


def compile_step(cfg: Any, shape: tuple[int, ...], chip: Any) -> str:
    """Compiles a contraction and its gradients; returns the program text."""
    import jax
    import jax.numpy as jnp

    import aqtlite

    dot = aqtlite.make_dot_general(cfg)

    def loss(x, w):
        return (dot(x, w, (((x.ndim - 1,), (0,)), ((), ()))) ** 2).sum()

    sharding = jax.sharding.SingleDeviceSharding(chip)
    x, w = (
        jax.ShapeDtypeStruct(one, jnp.float32, sharding=sharding)
        for one in (shape, (shape[-1], COLUMNS))
    )
    lowered = (
        jax.jit(jax.grad(loss, (0, 1))).trace(x, w).lower(lowering_platforms=("cuda",))
    )
    return lowered.compile().as_text()


def contractions(program: str) -> list[str]:
    """The kernels of a GPU program other than fusions, with their types.

    >>> contractions('%a = (f32[2,2]{1,0}) custom-call(%b), custom_call_target="f"')
    ['f -> f32[2,2]']
    """
    found = re.findall(
        r"= \(?(\w+\[[\d,]*\]).* custom-call\(.*custom_call_target=\"([^\"]+)\"",
        program,
    )
    return [f"{target} -> {result}" for result, target in found]


if __name__ == "__main__":
    main()
