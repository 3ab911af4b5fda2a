"""A quantized KV cache for Flax's attention layers."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax.core import Scope

from aqtlite import config, kv_cache
from aqtlite.flax.linen.caller import find_caller, path_of
from aqtlite.kv_cache import KVCache, attention
from aqtlite.qtensor.qtensor import QTensor

COLLECTION = "cache"

_KEY, _VALUE, _INDEX = "cached_key", "cached_value", "cache_index"
"""Names of the variables in Flax's own cache."""

_RING_INDEX = "ring_index"
"""Name of the index of a cache with a window, which may be larger than its length."""

_STORED = QTensor, kv_cache.Packed


@dataclasses.dataclass(frozen=True)
class QuantizedCache:
    """Attention with a quantized cache of keys and values, for decoding.

    Pass it as `attention_fn=` of `nn.MultiHeadDotProductAttention`, instead of
    ``decode=True``, or call it once per module in your own attention layer. The
    parameters of the layer, and the names of the variables in the collection "cache",
    are Flax's; keys and values are `QTensor`s, or packed (`aqtlite.kv_cache.Packed`).

    Like Flax's own cache, it is created by `init` with the length of the sequence given
    to `init`. A call of ``apply(..., mutable=["cache"])`` then takes the next
    positions, one or several at once (a prompt); each attends to itself and all before
    it. Donate the cache to the compiled step to update it in place. Keys and values may
    have fewer heads than queries (grouped-query attention).

    >>> import flax.linen as nn, jax.numpy as jnp
    >>> layer = nn.MultiHeadDotProductAttention(2, attention_fn=QuantizedCache())
    >>> variables = layer.init(jax.random.key(0), jnp.ones((1, 16, 8)))
    >>> variables["cache"]["cached_key"].qvalue.dtype
    dtype('int8')
    >>> out, updated = layer.apply(variables, jnp.ones((1, 3, 8)), mutable=["cache"])
    >>> out.shape, int(updated["cache"]["cache_index"])
    ((1, 3, 8), 3)

    Raises:
        TypeError: if `cfg` is not a `config.DotGeneral`.
        ValueError: if `cfg` cannot quantize a cache.
    """

    cfg: config.DotGeneral = dataclasses.field(default_factory=config.qat)
    """Config of the contractions of queries with keys, and probabilities with values:
    ``fwd.rhs`` quantizes the cache, ``fwd.lhs`` the queries and probabilities.
    `aqtlite.kv_cache.config_for` makes one of 8, 4 or 3 bits."""

    window: int | None = None
    """Number of last positions that are attended to; None for all. The cache is a ring,
    of the length of the sequence given to `init`."""

    def __post_init__(self):
        kv_cache.check_config(self.cfg)

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: jax.Array | None = None,
        *,
        dropout_rate: float = 0.0,
        deterministic: bool = True,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
    ) -> jax.Array:
        """Appends keys and values to the cache, and attends to all cached positions.

        Args:
            query: ``(*batch, positions, query heads, depth)``.
            key: ``(*batch, positions, heads, depth)``.
            value: ``(*batch, positions, heads, value depth)``.
            mask: True where attended; the last axis has the length of the cache.
            dropout_rate: dropout rate of attention; must be 0 unless `deterministic`.
            deterministic: whether dropout is off.
            qk_attn_weights_einsum: must be None; `cfg` quantizes the contraction.
            attn_weights_value_einsum: must be None; `cfg` quantizes the contraction.

        Raises:
            ValueError: if there is no cache, or it is not mutable, is full, was created
                with another config or shape, or is created twice in a module; or if
                dropout or an einsum is given.
        """
        attention.check_no_dropout(dropout_rate, deterministic=deterministic)
        if qk_attn_weights_einsum is not None or attn_weights_value_einsum is not None:
            raise ValueError(
                "QuantizedCache contracts queries and values by its own cfg; leave "
                "qk_attn_weights_einsum and attn_weights_value_einsum None"
            )
        scope = _scope()
        if not scope.has_variable(COLLECTION, _KEY):
            _make(scope, key, value, self.cfg, self.window)
            return kv_cache.attend_uncached(query, key, value, self.cfg, mask)
        cache = _read(scope, self.window)
        if scope.get_flag("initializing", False):
            raise ValueError(
                f"{path_of(scope)} calls QuantizedCache a second time in init, and has "
                "one cache: call each in a module of its own, and initialize with one "
                "call, of the longest sequence"
            )
        if not scope.is_mutable_collection(COLLECTION):
            raise ValueError(
                f"{path_of(scope)} was called without mutable=['{COLLECTION}'], and "
                "writes the next positions to that collection: give it to model.apply, "
                "and beside the arguments of a call to convert"
            )
        try:
            cache = kv_cache.append(cache, key, value, self.cfg)
        except ValueError as error:
            raise ValueError(f"{path_of(scope)}: {error}") from error
        _write(scope, cache)
        return kv_cache.attend(query, cache, self.cfg, mask)


def _scope() -> Scope:
    """Returns the scope of the calling module."""
    scope = find_caller().variables
    if scope is None:
        raise ValueError(
            "QuantizedCache was called outside a Flax module, or inside a "
            "transformation such as jax.jit within one, where it has no variables; "
            "aqtlite.kv_cache has functions without modules"
        )
    return scope


def _make(
    scope: Scope,
    key: jax.Array,
    value: jax.Array,
    cfg: config.DotGeneral,
    window: int | None,
) -> None:
    """Creates an empty cache with the length of this sequence."""
    if not scope.is_mutable_collection(COLLECTION):
        raise ValueError(
            f"{path_of(scope)} has no '{_KEY}' in the collection '{COLLECTION}': make "
            "it by model.init with a sequence of the longest length, and apply with "
            f"mutable=['{COLLECTION}']"
        )
    made = kv_cache.empty(key.shape, key.dtype, cfg, value.shape[-1], window)
    _write(scope, made)


def _index_name(window: int | None) -> str:
    return _INDEX if window is None else _RING_INDEX


def _read(scope: Scope, window: int | None) -> KVCache:
    key, value, index = (
        scope.get_variable(COLLECTION, name)
        for name in (_KEY, _VALUE, _index_name(window))
    )
    if index is None:
        raise ValueError(
            f"the cache of {path_of(scope)} was made with another window than "
            f"QuantizedCache.window={window}; initialize it with this one"
        )
    if not isinstance(key, _STORED) or not isinstance(value, _STORED):
        raise TypeError(
            f"'{_KEY}' of {path_of(scope)} is an array, as Flax's own cache keeps it: "
            "QuantizedCache goes in place of decode=True, and has a cache of its own"
        )
    return KVCache(key, value, index, window=window)


def _write(scope: Scope, cache: KVCache) -> None:
    scope.put_variable(COLLECTION, _KEY, cache.key)
    scope.put_variable(COLLECTION, _VALUE, cache.value)
    scope.put_variable(COLLECTION, _index_name(cache.window), cache.index)


def map_caches(
    change: Callable[[KVCache], KVCache],
    collection: Any,
    window: int | None = None,
    stacked: int = 0,
) -> Any:
    """Changes each quantized cache in a collection "cache".

    >>> import flax.linen as nn, jax.numpy as jnp
    >>> layer = nn.MultiHeadDotProductAttention(2, attention_fn=QuantizedCache())
    >>> cache = layer.init(jax.random.key(0), jnp.ones((3, 16, 8)))["cache"]
    >>> cache = map_caches(lambda one: kv_cache.truncate(one, [4, 2, 0]), cache)
    >>> cache["cache_index"].tolist()
    [0, 0, 0]

    Args:
        change: function of a `KVCache`, such as `kv_cache.truncate` or
            `kv_cache.grow` with their other arguments.
        collection: the collection "cache", or a part of it.
        window: that of `QuantizedCache`.
        stacked: number of leading axes of layers in each array, over which `change` is
            mapped: 1 under `nn.scan`.

    Returns:
        The collection, with all other variables as they are.

    Raises:
        ValueError: if a cache was made with a window and none is given, or the other
            way round.
    """
    if not isinstance(collection, Mapping):
        return collection
    if not isinstance(collection.get(_KEY), _STORED):
        return {
            name: map_caches(change, node, window, stacked)
            for name, node in collection.items()
        }
    index = _index_name(window)
    if index not in collection:
        raise ValueError(
            f"window={window} is not that of a cache with variables {set(collection)}; "
            "give the one of QuantizedCache"
        )
    cache = KVCache(
        collection[_KEY], collection[_VALUE], collection[index], window=window
    )
    for _ in range(stacked):
        change = jax.vmap(change)
    after = change(cache)
    made = {_KEY: after.key, _VALUE: after.value, index: after.index}
    return {**collection, **made}


def check_room(collection: Any, path: tuple[str, ...] = ()) -> None:
    """Checks that no cache was given more positions than it has room for.

    For calls that are traced, in which `kv_cache.append` does not know the index.
    Caches of scanned layers, whose indices are stacked, are not checked.

    Args:
        collection: the collection "cache" after the call, or a part of it.
        path: names of the modules around the part.

    Raises:
        ValueError: if a cache has an index larger than its length.
    """
    if not isinstance(collection, Mapping):
        return
    key, index = collection.get(_KEY), collection.get(_INDEX)
    if (
        isinstance(key, _STORED)
        and isinstance(index, jax.Array)
        and not isinstance(index, jax.core.Tracer)
        and index.ndim == 0
        and index > key.shape[-3]
    ):
        raise ValueError(
            f"{'/'.join(path) or 'the root module'}: the KV cache has room for "
            f"{key.shape[-3]} positions, and was given {index} in all; initialize it "
            "with a longer sequence"
        )
    for name, node in collection.items():
        check_room(node, (*path, name))
