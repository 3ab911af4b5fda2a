"""Serving of an artifact in a fresh process, compared with the trained model.

The process gets only the artifact's folder, not the float weights. The trainer calls
`serve_in_fresh_process`, which runs ``python -m aqtlite_demo.serving FOLDER``.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import aqtlite
from aqtlite_demo import artifact, generate
from aqtlite_demo.errors import ServingError

REQUEST = "request.npz"
RESPONSE = "response.json"


@dataclasses.dataclass(frozen=True)
class Served:
    """Results of the serving process."""

    bit_exact: bool
    """True if the served logits equal the trained ones in every bit."""
    largest_difference: float
    seconds_per_token: float
    sample: list[int]
    """Generated tokens."""


def forward(model: Any, variables: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits of the compiled model, for both training and serving."""
    return np.asarray(jax.jit(model.apply)(variables, tokens))


def serve_in_fresh_process(
    folder: pathlib.Path,
    *,
    tokens: np.ndarray,
    trained_logits: np.ndarray,
    prompt: np.ndarray,
    new_tokens: int,
    seed: int,
    cache: str = "float32",
) -> Served:
    """Serve the artifact in `folder` from a new process.

    Args:
        folder: folder written by `artifact.save`.
        tokens: batch of tokens, ``(batch, length)``.
        trained_logits: `forward` of the tokens with the trained variables.
        prompt: tokens to continue.
        new_tokens: number of tokens to generate.
        seed: seed for sampling.
        cache: dtype of the KV cache, as for `generate.cache_config`.

    Raises:
        ServingError: if the process fails.
    """
    np.savez(
        folder / REQUEST,
        tokens=tokens,
        trained_logits=trained_logits,
        prompt=prompt,
        new_tokens=new_tokens,
        seed=seed,
        cache=cache,
    )
    (folder / RESPONSE).unlink(missing_ok=True)
    # aqtlite may run from a checkout without being installed.
    root = str(pathlib.Path(aqtlite.__path__[0]).parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    process = subprocess.run(
        [sys.executable, "-m", "aqtlite_demo.serving", str(folder)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        check=False,
        text=True,
    )
    if process.returncode:
        raise ServingError(
            f"the serving process for {folder} failed with exit code "
            f"{process.returncode}: {_error_line(process.stderr)}"
        ) from RuntimeError(process.stderr)
    return Served(**json.loads((folder / RESPONSE).read_text()))


def _error_line(stderr: str) -> str:
    """The line of a traceback that names the exception, else the last line."""
    lines = stderr.strip().splitlines() or ["no message"]
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit):", line)]
    return (named or lines)[-1]


def serve(folder: pathlib.Path) -> Served:
    """Restore an artifact, and answer the request in its folder."""
    model, variables = artifact.load(folder)
    with np.load(folder / REQUEST) as request:
        served_logits = forward(model, variables, request["tokens"])
        trained_logits = request["trained_logits"]
        cache = generate.cache_config(str(request["cache"]))
        sample, seconds_per_token = generate.generate(
            model.clone(cache=cache),
            variables,
            request["prompt"],
            int(request["new_tokens"]),
            int(request["seed"]),
        )
    return Served(
        bit_exact=served_logits.tobytes() == trained_logits.tobytes(),
        largest_difference=float(np.abs(served_logits - trained_logits).max()),
        seconds_per_token=seconds_per_token,
        sample=sample.tolist(),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Serve one folder, and write `RESPONSE` into it."""
    parser = argparse.ArgumentParser(prog="python -m aqtlite_demo.serving")
    parser.add_argument("folder", type=pathlib.Path, help="an artifact with a request")
    folder = parser.parse_args(argv).folder
    artifact.quiet_logging()
    served = serve(folder)
    (folder / RESPONSE).write_text(json.dumps(dataclasses.asdict(served)) + "\n")


if __name__ == "__main__":
    main()
