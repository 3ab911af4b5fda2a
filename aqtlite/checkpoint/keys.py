"""Keys of `jax.random` in checkpoints, which store the data of keys."""

from typing import Any

import jax


def is_key(leaf: Any) -> bool:
    """Whether an array, or a shape, has a dtype of keys of `jax.random`."""
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def generator_of(keys: Any) -> Any:
    """Generator of keys, or of a shape of keys: its name, where JAX has one."""
    found: list[Any] = []
    jax.eval_shape(lambda one: found.append(jax.random.key_impl(one)), keys)
    return found[0]


def as_key(data: Any, like: Any) -> jax.Array:
    """Wraps the data of a key.

    Args:
        data: data of the key, as a checkpoint stores it.
        like: key of the same generator, or its shape.
    """
    return jax.random.wrap_key_data(data, impl=generator_of(like))


def shape_of_keys(generator: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array of keys.

    Raises:
        ValueError: if JAX has no such generator.
    """
    one = jax.eval_shape(lambda: jax.random.key(0, impl=generator))
    return jax.ShapeDtypeStruct(shape, one.dtype)
