"""Artifacts: saved serving variables, with the model's sizes and config.

An artifact is a folder::

    checkpoint/    the serving variables, written by Orbax
    model.json     the model's sizes
    config.json    its quantization config (absent for float)

The checkpoint of a quantized model holds integers and scales, and no float kernel.
"""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from absl import logging

from aqtlite import config
from aqtlite.flax import convert
from aqtlite_demo import model as model_lib

SIZES = ("layers", "width", "heads", "length", "vocabulary")
CHECKPOINT = "checkpoint"


def serving_variables(model: model_lib.Transformer, variables: Any) -> Any:
    """Converted variables, or for a float model the variables themselves."""
    if model.cfg is None:
        return variables
    return convert(model, variables, _sample_tokens())


def save(folder: pathlib.Path, model: model_lib.Transformer, serving: Any) -> None:
    """Write an artifact, replacing an older one."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {name: getattr(model, name) for name in SIZES}
    (folder / "model.json").write_text(json.dumps(sizes, indent=2) + "\n")
    if model.cfg is None:
        (folder / "config.json").unlink(missing_ok=True)
    else:
        (folder / "config.json").write_text(config.to_json(model.cfg) + "\n")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((folder / CHECKPOINT).resolve(), serving, force=True)


def load(folder: pathlib.Path) -> tuple[model_lib.Transformer, Any]:
    """Restore an artifact: the model and the serving variables."""
    sizes = json.loads((folder / "model.json").read_text())
    model = model_lib.Transformer(**sizes, cfg=_load_config(folder / "config.json"))
    with ocp.StandardCheckpointer() as checkpointer:
        serving = checkpointer.restore(
            (folder / CHECKPOINT).resolve(), _abstract_serving_variables(model)
        )
    return model, serving


def checkpoint_bytes(folder: pathlib.Path) -> int:
    """Size on disk of an artifact's checkpoint."""
    files = (folder / CHECKPOINT).rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def quiet_logging() -> None:
    """Hide Orbax's progress messages, which are logged through absl."""
    logging.set_verbosity(logging.ERROR)


def _load_config(path: pathlib.Path) -> config.DotGeneral | None:
    if not path.exists():
        return None
    cfg = config.from_json(path.read_text())
    if not isinstance(cfg, config.DotGeneral):
        raise TypeError(f"{path} holds a {type(cfg).__name__}, not a DotGeneral")
    return cfg


def _abstract_serving_variables(model: model_lib.Transformer) -> Any:
    """Shapes and dtypes of the serving variables, without computing them."""
    abstract = jax.eval_shape(model.init, jax.random.key(0), _sample_tokens())
    abstract = jax.eval_shape(lambda v: serving_variables(model, v), abstract)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract
    )


def _sample_tokens() -> jax.Array:
    return jnp.zeros((1, 2), jnp.int32)
