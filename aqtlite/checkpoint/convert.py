"""Conversion of the checkpoint of a trained model for serving."""

import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import rich.console
from flax import nnx

from aqtlite.checkpoint import replacement, run
from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.formats import Reader, local_path
from aqtlite.checkpoint.job import job_of
from aqtlite.checkpoint.load_float import calibrated, open_float, variables_of
from aqtlite.checkpoint.move import Move
from aqtlite.checkpoint.moved import Moved
from aqtlite.checkpoint.report import Report
from aqtlite.flax.linen.quantize_model import Model


def convert_checkpoint(
    source: str | os.PathLike,
    target: str | os.PathLike,
    model: Model | nnx.Module,
    *sample_args: Any,
    sample_kwargs: Mapping[str, Any] | None = None,
    subtree: str | Sequence[str] = (),
    moves: Sequence[Move] = (),
    calibrate: Iterable[Any] | None = None,
    keep_float: Sequence[str] = (),
    packed: str | None = None,
    allow_nonfinite: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    console: rich.console.Console | None = None,
) -> Report:
    """Converts the checkpoint of a trained model into a serving checkpoint.

    Does from disk to disk what `aqtlite.flax.convert` or `aqtlite.flax.nnx.convert`
    does in memory, and gives the same arrays bit for bit. The model is traced with
    shapes only, and the part of the jaxpr that computes frozen weights runs for one
    weight at a time. Integers of 4, 2 and 1 bits are packed two, four and eight to a
    byte.

    The target appears whole or not at all. A conversion that fails or is interrupted
    leaves its finished weights beside the target, in a folder ``.NAME.converting``. The
    same call resumes from that folder; to give up, remove it.

    Args:
        source: an Orbax checkpoint, a safetensors file or a folder of them, or a
            ``.msgpack`` file of `flax.serialization.to_bytes`. It holds the variables
            of the model, or only their collection "params", in float32, bfloat16 or
            float16, with or without partitioning metadata (`nn.with_partitioning`).
            For an NNX model, the `nnx.state` or pure dictionary of the quantized
            model, or of the float model before quantization.
        target: path to write: a safetensors file if it ends in ``.safetensors``,
            otherwise an Orbax folder.
        model: a Linen module with `AqtDotGeneral` or `AqtEinsum` inside, or the result
            of `aqtlite.flax.quantize_model`; or an NNX model as
            `aqtlite.flax.nnx.convert` takes it, possibly abstract (`nnx.eval_shape`).
        *sample_args: arguments of ``model.apply(variables, *sample_args)`` in serving,
            or of ``model(*sample_args)`` for NNX; or their shapes
            (`jax.ShapeDtypeStruct`).
        sample_kwargs: keyword arguments in serving, or their shapes.
        subtree: path of the variables, or of "params", in a source that holds more:
            ``"params"`` in a training state, ``"state/params"`` in a composite
            checkpoint with an item "state". Several paths are collections:
            ``("params", "batch_stats")``.
        moves: map from the names of another library's checkpoint, float or quantized,
            to those of the model (`load_quantized` lists its formats). A weight that is
            quantized keeps its integers where the config of the model has its grid and
            blocks, and the model does no more than move it; else it is decoded and
            rounded again, and the report says so.
        calibrate: batches, as `aqtlite.flax.calibrate_in_float` takes them, to gather
            statistics of activations from, for configs with static ranges: arrays of
            this process, in which the float model has to fit. None takes the statistics
            in the source.
        keep_float: patterns (``*`` matches anything) of the paths of weights to leave
            in float, or of the parameters that they are computed from.
        packed: as in `aqtlite.flax.convert`: "cpu" stores integers as the kernel for
            CPUs reads them. Such a checkpoint serves everywhere.
        allow_nonfinite: whether to convert weights that hold NaN or infinities.
        overwrite: whether to replace a converted checkpoint at the target's path.
        dry_run: whether to plan only, and write nothing.
        console: console that shows progress; None for no output. Progress is also
            logged (`absl.logging`).

    Returns:
        A report of the sizes and signal-to-noise ratio of each weight.

    Raises:
        CheckpointError: if the source is damaged, is not of this model, holds NaN, or
            is converted already; if the model cannot be traced with the sample inputs;
            if the target exists; or if the disk is full.
        ValueError: if the model has nothing to freeze, as in `aqtlite.flax.convert`.

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
    out = local_path(target)
    paths = (subtree,) if isinstance(subtree, str) else tuple(subtree)
    opened: Reader
    if not moves:
        opened = open_float(pathlib.Path(source), paths)
    elif paths:
        raise CheckpointError("a map names all variables: give subtree or moves")
    else:
        opened = Moved(pathlib.Path(source), moves)
    kwargs = dict(sample_kwargs or {})
    if not isinstance(model, Model | nnx.Module):
        raise CheckpointError(
            "model has to be a Linen module, an NNX module, or what quantize_model "
            f"returned, got {type(model).__name__}; aqtlite.convert_function converts "
            "functions, in memory"
        )
    variables = variables_of(model, sample_args, kwargs)
    if calibrate is not None:
        # Before the batches are run, which takes long.
        replacement.check_existing(out, overwrite)
        opened = calibrated(opened, variables, calibrate)
    job = job_of(opened, variables, keep_float, packed)
    if dry_run:
        return run.plan(job, opened, out, overwrite)
    return run.run(job, opened, out, allow_nonfinite, overwrite, console)
