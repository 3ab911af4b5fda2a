"""Measure memory and throughput of checkpoint conversion.

    python -m benchmarks.convert_checkpoint [--format safetensors] [--layers 34]
        [--width 4096] [--json FILE]

Writes an Orbax checkpoint (or a safetensors file) of a float32 model (34 layers of
4096 x 8192, 4.6 GB) into a temporary folder, copies it (synced to disk, like the
conversion's target), and converts it in a separate process, sampling the resident
memory of that process every 100 ms. Reports the peak memory above that at the start, in
units of the largest weight, and the throughput next to that of the copy, in float32
bytes per second.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

_CHILD = "--child"


def factory(layers: int, width: int) -> Any:
    """Model and sample inputs."""
    import jax
    from flax import linen as nn

    from aqtlite import config
    from aqtlite.flax import AqtDotGeneral

    dot_general = AqtDotGeneral(config.fully_quantized())
    stack = [
        nn.Dense(width * (2 if i % 2 == 0 else 1), dot_general=dot_general)
        for i in range(layers)
    ]
    return nn.Sequential(stack), (jax.ShapeDtypeStruct((1, width), "float32"),)


def write_source(path: pathlib.Path, layers: int, width: int) -> int:
    """Write the float checkpoint; return the size in bytes of the largest weight."""
    import jax
    import numpy as np

    from aqtlite.checkpoint.arrays import ArrayInfo, LazyArray
    from aqtlite.checkpoint.formats import writer_for
    from aqtlite.checkpoint.names import path_name

    model, args = factory(layers, width)
    shapes = jax.eval_shape(model.init, jax.random.key(0), *args)
    rng = np.random.default_rng(0)

    def lazy(name: str, info: ArrayInfo) -> LazyArray:
        return LazyArray(
            name, info, lambda: rng.standard_normal(info.shape, np.float32)
        )

    leaves = jax.tree_util.tree_flatten_with_path(shapes)[0]
    infos = {
        path_name(key): ArrayInfo(leaf.shape, np.dtype("float32"))
        for key, leaf in leaves
    }
    arrays = [lazy(n, i) for n, i in infos.items()]
    writer_for(path).write(path, arrays, lambda: "")
    return max(info.nbytes for info in infos.values())


def child(source: str, target: str, layers: int, width: int) -> None:
    """Convert, printing "ready" once everything is imported, and then the seconds."""
    from absl import logging

    from aqtlite import checkpoint

    # Orbax logs every step of a save through absl.
    logging.set_verbosity(logging.ERROR)
    model, args = factory(layers, width)
    print("ready", flush=True)
    start = time.perf_counter()
    checkpoint.convert_checkpoint(source, target, model, *args)
    print(time.perf_counter() - start, flush=True)


def resident(pid: int) -> int:
    """Resident memory of a process in bytes; 0 if the process has ended."""
    try:
        pages = pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def size(path: pathlib.Path) -> int:
    """Size in bytes of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def measure(
    folder: pathlib.Path, suffix: str, layers: int, width: int
) -> dict[str, float]:
    """Write, copy and convert a checkpoint, and return the figures."""
    from aqtlite.checkpoint.staging import remove

    source, copy, target = (folder / (n + suffix) for n in ("source", "copy", "target"))
    largest = write_source(source, layers, width)
    total = size(source)
    os.sync()
    start = time.perf_counter()
    (shutil.copytree if source.is_dir() else shutil.copyfile)(source, copy)
    os.sync()
    copy_seconds = time.perf_counter() - start
    remove(copy)
    arguments = [_CHILD, str(source), str(target)]
    sizes = ["--layers", str(layers), "--width", str(width)]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.convert_checkpoint", *arguments, *sizes],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    base = peak = resident(process.pid)
    while process.poll() is None:
        peak = max(peak, resident(process.pid))
        time.sleep(0.1)
    seconds = float(process.stdout.read())
    bytes_before = sum(layers * [width * 2 * width * 4])
    return {
        "checkpoint GB": total / 1e9,
        "largest weight MB": largest / 1e6,
        "peak over the start MB": (peak - base) / 1e6,
        "peak over the start / largest weight": (peak - base) / largest,
        "copy MB/s": bytes_before / 1e6 / copy_seconds,
        "convert MB/s": bytes_before / 1e6 / seconds,
        "convert / copy throughput": copy_seconds / seconds,
        "size after / before": size(target) / total,
    }


def main() -> None:
    """Print the figures, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=34)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--json", metavar="FILE", help="where to write the figures")
    parser.add_argument(_CHILD, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--format", choices=("orbax", "safetensors"), default="orbax")
    options = parser.parse_args()
    if options.child:
        child(*options.child, options.layers, options.width)
        return
    with tempfile.TemporaryDirectory() as folder:
        suffix = ".safetensors" if options.format == "safetensors" else ""
        sizes = options.layers, options.width
        figures = measure(pathlib.Path(folder), suffix, *sizes)
    for name, value in figures.items():
        print(f"{name:>40} {value:.2f}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
