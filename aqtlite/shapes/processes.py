"""Arrays that span the processes of a program: what each process has to do alike.

JAX calls a function of such an array in all of these processes, and assumes that their
other arguments, and all that they decide, are equal.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

Item = TypeVar("Item")

Devices = tuple[jax.Device, ...]
"""Devices that arrays span, those of the first process first."""


def spans(x: Any) -> bool:
    """Whether an array, or the shape of one, has parts in other processes."""
    return _placed_beyond(x) is not None


def is_readable(x: Any) -> bool:
    """Whether this process has the values of an array, which is not traced."""
    return not isinstance(x, jax.core.Tracer) and not spans(x)


def spanned_by(tree: Any) -> Devices:
    """Returns the devices of arrays that span processes; none if all are here.

    Args:
        tree: pytree of arrays, or of shapes with shardings, and of anything else.
    """
    shardings = {_placed_beyond(x) for x in jax.tree.leaves(tree)} - {None}
    devices = {one for sharding in shardings for one in sharding.device_set}
    return tuple(sorted(devices, key=lambda one: (one.process_index, one.id)))


def _placed_beyond(x: Any) -> Any:
    """Returns the sharding of an array that has parts in other processes, or None."""
    if isinstance(x, jax.core.Tracer):
        return None
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, jax.sharding.Sharding):
        return None
    mesh = getattr(sharding, "mesh", None)
    if isinstance(mesh, jax.sharding.AbstractMesh) or sharding.is_fully_addressable:
        return None
    return sharding


def of_first(values: Sequence[float], devices: Devices) -> list[float]:
    """Returns the numbers of the first process, for all to decide alike.

    All of the processes have to call it, with as many numbers.

    Args:
        values: numbers that each process has measured.
        devices: result of `spanned_by`; these numbers are returned if it is empty.
    """
    if not devices:
        return list(values)
    own = np.asarray(values, np.float64).view(np.uint32)
    found: list[float] = _rows(own, devices)[0].view(np.float64).tolist()
    return found


def alike(items: Iterable[Item], others: Any) -> Iterator[Item]:
    """Yields items, such as batches, that are equal in all processes if they have to.

    That is where an argument spans processes: a process with its own values would not
    get its own result, but a wrong one. All of these processes iterate together.

    Args:
        items: pytrees of arrays.
        others: other arguments of the calls with these items, such as variables.

    Raises:
        ValueError: if arrays of one process differ from those of another, or if one has
            more items.
    """
    of_others, devices = spanned_by(others), ()
    for item in items:
        devices = of_others or spanned_by(item)
        if devices:
            _check(_digest(item), devices)
        yield item
    if devices:
        _check(_END, devices)


_END = np.zeros(8, np.uint32)
"""In place of the digest of an item, that there is none."""


def _check(own: np.ndarray, devices: Devices) -> None:
    rows = _rows(own, devices)
    if (rows == rows[0]).all():
        return
    what = "the values of a batch, or of its mask, differ between processes"
    if (rows == _END).all(axis=1).any():
        what = "one process has more batches than another"
    raise ValueError(
        f"{what}, in calls with arrays that span processes, of which JAX makes one "
        "computation. For one of all batches, make arrays of all processes with "
        "jax.make_array_from_process_local_data. For each process to take its own "
        "batches, give variables that are whole in each, such as those that "
        "jax.experimental.multihost_utils.process_allgather(variables, tiled=True) "
        "returns"
    )


_VALUES = (np.ndarray, np.generic, jax.Array, int, float, complex)


def _digest(item: Any) -> np.ndarray:
    """Returns a digest of what a process gives by itself: eight numbers, not all 0."""
    hashed = hashlib.sha256()
    for x in jax.tree.leaves(item):
        if spans(x) or not isinstance(x, _VALUES):
            hashed.update(type(x).__name__.encode())
            continue
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        value = np.asarray(x)
        hashed.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    return np.frombuffer(hashed.digest(), np.uint32)


def _rows(own: np.ndarray, devices: Devices) -> np.ndarray:
    """Gathers an array of 32 bits from each process, as rows for its devices.

    It runs on all of them, after the call of the batch before. On one device of each
    process it would run beside that call, and gloo, on CPUs, mix up their collectives.
    """
    mesh = jax.sharding.Mesh(np.array(devices), ("device",))
    given, wanted = (
        NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("device",), ())
    )
    shape = (len(devices), *own.shape)
    rows = jax.make_array_from_callback(shape, given, lambda _: own[None])
    with jax.set_mesh(mesh):  # A mesh that the caller has set has other devices.
        return np.asarray(jax.device_put(rows, wanted))
