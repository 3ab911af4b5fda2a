"""Byte pair encoding: frequent sequences of bytes as tokens."""

import dataclasses
from typing import Self

import numpy as np

VOCABULARY = 512
"""Number of tokens, of which the first 256 are the bytes."""

_BYTES = 256


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Turns text into tokens and back, without loss."""

    pairs: tuple[tuple[int, int], ...]
    """The two tokens that each token after the bytes stands for."""

    @classmethod
    def learn(cls, text: bytes) -> Self:
        """Repeatedly makes a token of the most frequent pair of tokens.

        Whitespace only begins a token, so that no token is longer than a word.

        >>> tokenizer = Tokenizer.learn(b"the cat and the dog and the owl")
        >>> [tokenizer.decode(np.array([token])) for token in (256, 257, 258)]
        [b'he', b'the', b' a']
        """
        tokens = np.frombuffer(text, np.uint8).astype(np.int64)
        begins_a_word = np.zeros(VOCABULARY, bool)
        begins_a_word[[ord(" "), ord("\n")]] = True
        pairs: list[tuple[int, int]] = []
        while _BYTES + len(pairs) < VOCABULARY:
            inside = ~begins_a_word[tokens[1:]]
            codes = tokens[:-1][inside] * VOCABULARY + tokens[1:][inside]
            counts = np.bincount(codes, minlength=1)
            code = int(counts.argmax())
            if counts[code] < 2:
                break
            pair = divmod(code, VOCABULARY)
            begins_a_word[_BYTES + len(pairs)] = begins_a_word[pair[0]]
            tokens = _merged(tokens, pair, _BYTES + len(pairs))
            pairs.append(pair)
        return cls(tuple(pairs))

    def encode(self, text: bytes) -> np.ndarray:
        """The tokens of a text, int32."""
        tokens = np.frombuffer(text, np.uint8).astype(np.int32)
        for token, pair in enumerate(self.pairs, start=_BYTES):
            tokens = _merged(tokens, pair, token)
        return tokens

    def decode(self, tokens: np.ndarray) -> bytes:
        """The text of tokens; of a token that was not learned, nothing."""
        texts = [bytes([byte]) for byte in range(_BYTES)]
        for one, other in self.pairs:
            texts.append(texts[one] + texts[other])
        texts += [b""] * (VOCABULARY - len(texts))
        return b"".join(texts[token] for token in tokens)


def _merged(tokens: np.ndarray, pair: tuple[int, int], token: int) -> np.ndarray:
    """Replaces a pair of tokens by one token, from left to right."""
    at = np.flatnonzero((tokens[:-1] == pair[0]) & (tokens[1:] == pair[1]))
    if pair[0] == pair[1]:
        # In a run of equal tokens, pairs overlap: take every other one.
        first = np.flatnonzero(np.diff(at, prepend=-2) != 1)
        lengths = np.diff(first, append=len(at))
        at = at[(np.arange(len(at)) - np.repeat(first, lengths)) % 2 == 0]
    tokens = tokens.copy()
    tokens[at] = token
    return np.delete(tokens, at + 1)
