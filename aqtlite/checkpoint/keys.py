"""Keys of `jax.random` in checkpoints, which hold their data."""

from typing import Any

import jax


def is_key(leaf: Any) -> bool:
    """Tells whether an array, or a shape, is of keys of `jax.random`."""
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def generator_of(keys: Any) -> Any:
    """The generator that keys, or their shape, are of: a name, if JAX has it."""
    found: list[Any] = []
    jax.eval_shape(lambda one: found.append(jax.random.key_impl(one)), keys)
    return found[0]


def as_key(data: Any, like: Any) -> jax.Array:
    """Makes the key of its data.

    Args:
        data: as a checkpoint has it.
        like: a key of that kind, or its shape.
    """
    return jax.random.wrap_key_data(data, impl=generator_of(like))


def shape_of_keys(generator: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array of keys.

    Raises:
        ValueError: if JAX has no such generator.
    """
    one = jax.eval_shape(lambda: jax.random.key(0, impl=generator))
    return jax.ShapeDtypeStruct(shape, one.dtype)
