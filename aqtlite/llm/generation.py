"""Compiled generation: the prompt at once, then one token after the other."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import aqtlite
from aqtlite import config
from aqtlite.llm.decoder import Decoder
from aqtlite.llm.sampling import Sampling, sample


@dataclasses.dataclass(frozen=True, eq=False)
class Generation:
    """Programs that continue prompts of one length, from `compile_generation`."""

    vocabulary: int
    prompt_length: int
    max_tokens: int
    _start: Callable[[], Any]
    _prefill: Callable[..., tuple[jax.Array, Any]]
    _step: Callable[..., tuple[jax.Array, Any]]

    def tokens(
        self, prompt: Sequence[int], seed: int = 0, stop: Collection[int] = ()
    ) -> Iterator[int]:
        """The tokens after a prompt, as they are computed.

        Args:
            prompt: tokens, `prompt_length` of them.
            seed: seed of the sampling.
            stop: tokens that end the text; they are not yielded.

        Raises:
            ValueError: if the prompt has another length, or a token that the model
                lacks.
        """
        if len(prompt) != self.prompt_length:
            raise ValueError(
                f"the programs are compiled for prompts of {self.prompt_length} "
                f"tokens, got {len(prompt)}"
            )
        if not 0 <= min(prompt) <= max(prompt) < self.vocabulary:
            raise ValueError(
                f"a prompt with the token {max(prompt)} is not one of the model, which "
                f"has a vocabulary of {self.vocabulary}: the tokenizer is another's"
            )
        return self._continued(list(prompt), seed, frozenset(stop))

    def _continued(
        self, prompt: list[int], seed: int, stop: frozenset[int]
    ) -> Iterator[int]:
        key = jax.random.key(seed)
        given = jnp.asarray(np.asarray([prompt], np.int32))
        token, caches = self._prefill(self._start(), given, jnp.int32(0), key)
        for i in range(self.max_tokens):
            found = int(token[0, 0])
            if found in stop:
                return
            yield found
            if i + 1 < self.max_tokens:
                position = jnp.int32(self.prompt_length + i)
                token, caches = self._step(caches, token, position, key)


def compile_generation(
    decoder: Decoder,
    prompt_length: int,
    max_tokens: int,
    *,
    cache: config.DotGeneral | None = None,
    sampling: Sampling | None = None,
) -> Generation:
    """Compiles the programs that continue one prompt.

    >>> from aqtlite import llm
    >>> cfg = llm.DecoderConfig(
    ...     vocabulary=32, width=16, heads=4, kv_heads=2, head_size=4, hidden=24,
    ...     ropes=(llm.Rope(),), windows=(None,),
    ... )
    >>> decoder = llm.Decoder(cfg, rngs=nnx.Rngs(0))
    >>> generation = compile_generation(decoder, 3, 2)
    >>> len(list(generation.tokens([3, 14, 15])))
    2

    Args:
        decoder: the model; its caches are not used.
        prompt_length: number of tokens of prompts.
        max_tokens: largest number of tokens after a prompt.
        cache: config of a quantized KV cache (`kv_cache.config_for`); None for floats.
        sampling: how tokens are chosen; None for greedily.

    Raises:
        ValueError: if a number is below 1, or the model has too few learned positions.
    """
    if prompt_length < 1 or max_tokens < 1:
        raise ValueError(
            "a prompt and the text after it have a token or more, got "
            f"{prompt_length} and {max_tokens}"
        )
    length, most = prompt_length + max_tokens, decoder.cfg.positions
    if most is not None and length > most:
        raise ValueError(
            f"{prompt_length} tokens of a prompt and {max_tokens} after it are more "
            f"than the {most} positions of the model"
        )
    how = Sampling() if sampling is None else sampling
    model = nnx.clone(decoder, variables=False)
    model.init_caches(1, length, cache, at_once=prompt_length)
    graph, empty, *others = nnx.split(model, nnx.Cache, ...)
    (state,) = others

    def run(
        state: Any, caches: Any, tokens: jax.Array, start: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, Any]:
        model = nnx.merge(graph, caches, state)
        logits = model.logits(model.hidden(tokens, start)[:, -1:])
        found = sample(logits, how, jax.random.fold_in(key, start))
        return found, nnx.state(model, nnx.Cache)

    key, start = jax.random.key(0), jnp.int32(0)
    prompt, token = (jnp.zeros((1, n), jnp.int32) for n in (prompt_length, 1))
    prefill = jax.jit(run, donate_argnums=1)
    compiled = prefill.lower(state, empty, prompt, start, key).compile()
    step = aqtlite.compile_serving(
        run, state, empty, token, start, key, donate_argnums=1
    )
    return Generation(
        decoder.cfg.vocabulary,
        prompt_length,
        max_tokens,
        lambda: jax.tree.map(jnp.copy, empty),
        lambda *args: compiled(state, *args),
        step,
    )
