"""Converting the checkpoint of a trained model into one for serving."""

import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import rich.console
from flax import nnx

from aqtlite.checkpoint import run
from aqtlite.checkpoint.calibrated import calibrated
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.job import job_of
from aqtlite.checkpoint.load_float import open_float, variables_of
from aqtlite.checkpoint.report import Report
from aqtlite.flax.linen.quantize_model import Model


def convert_checkpoint(
    source: str | os.PathLike,
    target: str | os.PathLike,
    model: Model | nnx.Module,
    *sample_args: Any,
    sample_kwargs: Mapping[str, Any] | None = None,
    subtree: str | Sequence[str] = (),
    calibrate: Iterable[Any] | None = None,
    keep_float: Sequence[str] = (),
    allow_nonfinite: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    console: rich.console.Console | None = None,
) -> Report:
    """Converts the checkpoint of a trained model into one for serving.

    Does what `aqtlite.flax.convert` or `aqtlite.flax.nnx.convert` does in memory, from
    disk to disk: the model is traced with shapes alone, and the part of the trace that
    computes a frozen weight is run for one weight at a time. The arrays are the same,
    bit for bit. Integers of 4, 2 and 1 bits are packed into bytes, two, four and eight
    to one.

    The target appears whole or not at all. A conversion that fails or is interrupted
    leaves its finished weights beside it, in a folder ``.NAME.converting``: the same
    call resumes there, and who gives up removes the folder.

    Args:
        source: an Orbax checkpoint, a safetensors file or a folder of them, or a
            ``.msgpack`` file of `flax.serialization.to_bytes`; of the variables, or of
            their collection "params" alone. float32, bfloat16 or float16, with or
            without the model's partitioning metadata (`nn.with_partitioning`). Of an
            NNX model, its `nnx.state` or pure dictionary, or those of the model that
            it quantizes.
        target: the path to write: a file if it ends in ``.safetensors``, else a folder,
            for Orbax.
        model: a Linen module with `AqtDotGeneral` or `AqtEinsum` inside, or what
            `aqtlite.flax.quantize_model` returned; or an NNX model as
            `aqtlite.flax.nnx.convert` takes it, with shapes in its variables if
            `nnx.eval_shape` made it.
        *sample_args: what ``model.apply(variables, *sample_args)`` takes in serving,
            or ``model(*sample_args)`` of NNX, or shapes of it (`jax.ShapeDtypeStruct`).
        sample_kwargs: sample inputs by name.
        subtree: the path of the variables, or of "params", in the source, if it holds
            more: ``"params"`` of a training state, ``"state/params"`` of a composite
            checkpoint with an item "state". Several paths are collections:
            ``("params", "batch_stats")``.
        calibrate: batches, as `aqtlite.flax.calibrate_in_float` takes them, to gather
            statistics of activations with, for configs that have some. This needs the
            memory for the float model. None takes the statistics of the source. Not for
            NNX models.
        keep_float: patterns (``*`` matches anything) of the paths of weights, or of
            the parameters that they are made of, to leave in float.
        allow_nonfinite: convert weights that hold NaN or infinities.
        overwrite: replace a converted checkpoint at the target's path.
        dry_run: plan only, and write nothing.
        console: shows progress; None is silent. Progress is also logged
            (`absl.logging`).

    Returns:
        A report: each weight with its sizes and its signal-to-noise ratio.

    Raises:
        CheckpointError: if the source is damaged, is not of this model, holds NaN, or
            is converted already; if the model cannot be traced with the sample inputs;
            if the target exists; or if the disk is full.
        ValueError: if the model has nothing to freeze, as `aqtlite.flax.convert`.

    >>> import tempfile, jax, jax.numpy as jnp
    >>> from flax import linen as nn, serialization
    >>> from aqtlite import checkpoint, config
    >>> from aqtlite.flax import AqtDotGeneral
    >>> dense = nn.Dense(64, dot_general=AqtDotGeneral(config.fully_quantized()))
    >>> x = jnp.ones((1, 64))
    >>> variables = dense.init(jax.random.key(0), x)
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "v.msgpack").write_bytes(serialization.to_bytes(variables))
    >>> report = convert_checkpoint(folder / "v.msgpack", folder / "serving", dense, x)
    >>> report.bytes_before, report.bytes_after
    (16640, 4608)
    >>> serving = checkpoint.load_serving(folder / "serving", dense)
    >>> bool((dense.apply(serving, x) == dense.apply(variables, x)).all())
    True
    """
    paths = (subtree,) if isinstance(subtree, str) else tuple(subtree)
    opened = open_float(pathlib.Path(source), paths)
    kwargs = dict(sample_kwargs or {})
    if not isinstance(model, Model | nnx.Module):
        raise CheckpointError(
            "model has to be a Linen module, an NNX module, or what quantize_model "
            f"returned, got {type(model).__name__}; aqtlite.convert_function converts "
            "functions, in memory"
        )
    if calibrate is not None:
        opened = calibrated(opened, model, sample_args, kwargs, calibrate)
    variables = variables_of(model, sample_args, kwargs)
    job = job_of(opened, variables, keep_float)
    out = pathlib.Path(target)
    if dry_run:
        return run.plan(job, opened, out, overwrite)
    return run.run(job, opened, out, allow_nonfinite, overwrite, console)
