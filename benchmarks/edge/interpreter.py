"""Outputs and latencies of files in LiteRT's interpreter."""

import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from ai_edge_litert.interpreter import Interpreter


class Program:
    """A loaded file that runs in one thread."""

    def __init__(self, data: bytes):
        self._interpreter = Interpreter(model_content=data, num_threads=1)
        self._interpreter.allocate_tensors()
        (self._input,) = self._interpreter.get_input_details()
        (self._output,) = self._interpreter.get_output_details()

    def put(self, x: np.ndarray) -> None:
        """Sets the input from floats, quantized if the input is integer."""
        dtype = self._input["dtype"]
        if dtype != np.float32:
            scale, zero_point = self._input["quantization"]
            x = np.rint(x * (np.float32(1) / np.float32(scale))) + zero_point
            limits = np.iinfo(dtype)
            x = np.clip(x, limits.min, limits.max)
        self._interpreter.set_tensor(self._input["index"], x.astype(dtype))

    def seconds(self) -> float:
        """Runs the file once; returns the seconds."""
        start = time.perf_counter()
        self._interpreter.invoke()
        return time.perf_counter() - start

    def output(self) -> np.ndarray:
        """The output as floats."""
        y = self._interpreter.get_tensor(self._output["index"])
        if self._output["dtype"] == np.float32:
            return y
        scale, zero_point = self._output["quantization"]
        return np.float32(scale) * (y.astype(np.float32) - np.float32(zero_point))


def outputs(data: bytes, images: np.ndarray, size: int) -> np.ndarray:
    """The outputs of a file for all images, run in batches; the last is padded."""
    program, found = Program(data), []
    for x in batches(images, size):
        program.put(x)
        program.seconds()
        found.append(program.output())
    return np.concatenate(found)[: len(images)]


def batches(images: np.ndarray, size: int) -> list[np.ndarray]:
    """Images in batches; the last is padded with the first images."""
    filled = np.concatenate([images, images[: -len(images) % size]])
    return [filled[i : i + size] for i in range(0, len(filled), size)]


def latencies(
    files: Mapping[str, bytes], x: np.ndarray, rounds: int
) -> dict[str, float]:
    """Median seconds of each file.

    Files run in turns, ten times each, so that other load affects all of them alike.
    """
    programs = {name: Program(data) for name, data in files.items()}
    times: dict[str, Any] = {name: [] for name in files}
    for program in programs.values():
        program.put(x)
        program.seconds()
    for _ in range(rounds):
        for name, program in programs.items():
            times[name] += [program.seconds() for _ in range(10)]
    return {name: statistics.median(found) for name, found in times.items()}
