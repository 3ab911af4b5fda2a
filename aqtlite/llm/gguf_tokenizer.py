"""A tokenizer from the key-value pairs of a GGUF file."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from aqtlite import extras
from aqtlite.checkpoint import CheckpointError
from aqtlite.checkpoint.quantized_formats.settings import Settings

_PREFIX = "tokenizer.ggml."

_WORDS = {
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "gpt-2": (
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    ),
}
"""What texts are cut into before bytes are merged, by ``tokenizer.ggml.pre``: the
regular expressions that the models' own ``tokenizer.json`` have."""

_OF_LLAMA_3 = "llama-bpe"
"""Its tokenizer takes words that are tokens as they are, whatever merges make of them,
and starts texts with a token. Files may leave both out, as llama.cpp knows them."""

_ENDS = "eos", "eot", "eom"
"""Names of the special tokens that end a text."""

_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens, in ``tokenizer.ggml.token_type``, that are found in a text before it
is cut into words."""


def of_metadata(metadata: Mapping[str, Any], where: str) -> tuple[Any, frozenset[int]]:
    """Makes a `tokenizers.Tokenizer`, and names the tokens that end a text.

    Args:
        metadata: the key-value pairs.
        where: the file, for messages.

    Raises:
        CheckpointError: if the pairs hold no tokenizer, or one of another kind.
    """
    package = extras.package("tokenizers")
    own = {
        key.removeprefix(_PREFIX): value
        for key, value in metadata.items()
        if key.startswith(_PREFIX)
    }
    settings = Settings(own, f"{where}: tokenizer.ggml")
    kind, tokens = own.get("model"), settings.strings("tokens")
    if not tokens:
        raise CheckpointError(
            f"{where} holds no tokenizer ({_PREFIX}tokens): name a tokenizer.json "
            "(--tokenizer)"
        )
    if kind == "gpt2":
        made = _of_bytes(package, settings, tokens)
    elif kind == "llama":
        made = _of_pieces(package, settings, tokens)
    else:
        raise CheckpointError(
            f"{where}: tokenizers of the kind {kind!r} are not made from GGUF, 'gpt2' "
            "and 'llama' are: name a tokenizer.json (--tokenizer)"
        )
    types = np.zeros(len(tokens))
    if own.get("token_type") is not None:
        types = _of_tokens(settings, "token_type", len(tokens))
    for add, of_type in (
        (made.add_special_tokens, _CONTROL),
        (made.add_tokens, _USER_DEFINED),
    ):
        add(
            [
                package.AddedToken(token, normalized=False)
                for token, one in zip(tokens, types.tolist(), strict=True)
                if one == of_type
            ]
        )
    bos = own.get("bos_token_id")
    has_bos = kind == "llama" or own.get("pre") == _OF_LLAMA_3
    if settings.flag("add_bos_token", default=has_bos) and bos is not None:
        name = _token(settings, tokens, bos)
        made.post_processor = package.processors.TemplateProcessing(
            single=f"{name} $A".replace(":", r"\:") if ":" in name else [name, "$A"],
            special_tokens=[(name, bos)],
        )
    for name in _ENDS:
        number = own.get(f"{name}_token_id")
        if number is not None:
            _token(settings, tokens, number)
    return made, stop_of(metadata, where)


def stop_of(metadata: Mapping[str, Any], where: str) -> frozenset[int]:
    """The tokens that end a text, of a file whose tokenizer may be of another kind.

    Args:
        metadata: the key-value pairs.
        where: the file, for messages.

    Raises:
        CheckpointError: if one is no number.
    """
    numbers = (number_of(metadata, name, where) for name in _ENDS)
    return frozenset(number for number in numbers if number is not None)


def number_of(metadata: Mapping[str, Any], name: str, where: str) -> int | None:
    """The number of a special token; None if the file has none.

    Args:
        metadata: the key-value pairs.
        name: "bos", "eos" and others of ``tokenizer.ggml.<name>_token_id``.
        where: the file, for messages.

    Raises:
        CheckpointError: if it is no number.
    """
    number = metadata.get(f"{_PREFIX}{name}_token_id")
    if number is not None and type(number) is not int:
        raise CheckpointError(f"{where} names the token {number!r}, no number")
    return number


def _of_bytes(package: Any, settings: Settings, tokens: Sequence[str]) -> Any:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have it."""
    where, name = settings.where, settings.values.get("pre", "gpt-2")
    if not isinstance(name, str) or name not in _WORDS:
        raise CheckpointError(
            f"{where}: pre is {name!r}, and {', '.join(_WORDS)} are known: name a "
            "tokenizer.json (--tokenizer)"
        )
    merges = [tuple(one.split(" ")) for one in settings.strings("merges")]
    if not merges or any(len(one) != 2 for one in merges):
        raise CheckpointError(f"{where}: merges is no list of pairs")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    made = package.Tokenizer(
        _model(
            package.models.BPE,
            where,
            vocab=vocabulary,
            merges=merges,
            ignore_merges=name == _OF_LLAMA_3,
        )
    )
    split = package.pre_tokenizers.Split(
        package.Regex(_WORDS[name]), behavior="isolated"
    )
    to_bytes = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = package.pre_tokenizers.Sequence([split, to_bytes])
    made.decoder = package.decoders.ByteLevel()
    return made


def _of_pieces(package: Any, settings: Settings, tokens: Sequence[str]) -> Any:
    """BPE of SentencePiece: pairs are merged into the piece with the best score."""
    scores = _of_tokens(settings, "scores", len(tokens))
    unknown = settings.integer("unknown_token_id", 0, 0)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    made = package.Tokenizer(
        _model(
            package.models.BPE,
            settings.where,
            vocab=vocabulary,
            merges=list(_merges(vocabulary, scores)),
            unk_token=_token(settings, tokens, unknown),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    decoders, normalizers = package.decoders, package.normalizers
    steps = [normalizers.Replace(" ", "\u2581")]
    after = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if settings.flag("add_space_prefix", default=True):
        steps.insert(0, normalizers.Prepend("\u2581"))
        after.append(decoders.Strip(" ", 1, 0))
    made.normalizer = normalizers.Sequence(steps)
    made.decoder = decoders.Sequence(after)
    return made


def _merges(
    vocabulary: Mapping[str, int], scores: np.ndarray
) -> Iterator[tuple[str, str]]:
    """The pairs that make a piece, those of the best pieces first."""
    found = []
    for piece, number in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                order = vocabulary[left], vocabulary[right]
                found.append((-float(scores[number]), order, (left, right)))
    return (pair for _, _, pair in sorted(found))


def _of_tokens(settings: Settings, key: str, count: int) -> np.ndarray:
    """A number for each token."""
    found = np.asarray(settings.values.get(key, ()))
    if found.shape != (count,) or found.dtype.kind not in "iuf":
        raise settings.wrong(key, f"a number for each of the {count} tokens")
    return found


def _token(settings: Settings, tokens: Sequence[str], number: Any) -> str:
    if type(number) is not int or not 0 <= number < len(tokens):
        raise CheckpointError(
            f"{settings.where} names the token {number!r}, and has {len(tokens)}"
        )
    return tokens[number]


def _model(make: Any, where: str, **fields: Any) -> Any:
    try:
        return make(**fields)
    except Exception as error:  # The package raises nothing narrower.
        raise CheckpointError(f"{where}: its tokenizer is damaged: {error}") from error
