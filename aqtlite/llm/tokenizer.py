"""Tokenizers that a checkpoint holds."""

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from aqtlite import extras
from aqtlite.checkpoint import CheckpointError, load_quantized
from aqtlite.llm import gguf_tokenizer, stop_tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer, and the tokens that end a text."""

    inner: Any
    """A `tokenizers.Tokenizer`."""

    stop: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with those that the model has at the beginning.

        Raises:
            ValueError: if the text is not valid Unicode.
        """
        _check_unicode(text)
        found: list[int] = self.inner.encode(text).ids
        return found

    def encode_rendered(self, text: str) -> list[int]:
        """The tokens of a text that contains its special tokens, as a rendered chat.

        Raises:
            ValueError: if the text is not valid Unicode.
        """
        _check_unicode(text)
        found: list[int] = self.inner.encode(text, add_special_tokens=False).ids
        return found

    def decoded(
        self, tokens: Iterable[int], after: Sequence[int] = ()
    ) -> Iterator[str]:
        """The text of tokens, piece by piece: whole characters, as soon as known.

        A character that is not whole at the end is left out.

        Args:
            tokens: the tokens.
            after: tokens whose text comes before, such as those of a prompt that is
                continued. Many tokenizers leave out the space at the start of a text,
                which is none in the middle of one.
        """
        added = self.inner.get_added_tokens_decoder()
        without_text = {number for number, one in added.items() if one.special}
        # The last piece's tokens, which say how the next ones join, and those since.
        held, joined = list(after), len(after)
        before = self._text(held)
        for token in tokens:
            if token in without_text:
                continue
            held.append(token)
            text = self._text(held)
            # A character of several tokens is U+FFFD until the last of them.
            if not text.startswith(before):
                before = before.rstrip("\ufffd")
            piece = text[len(before) :]
            if piece and not piece.endswith("\ufffd"):
                yield piece
                held = held[joined:]
                joined, before = len(held), self._text(held)

    def _text(self, tokens: Sequence[int]) -> str:
        found: str = self.inner.decode(tokens, skip_special_tokens=True)
        return found


def load_tokenizer(
    path: str | os.PathLike, *, model: str | os.PathLike | None = None
) -> Tokenizer:
    """Loads the tokenizer of a checkpoint.

    Args:
        path: a folder or file of Hugging Face, with ``tokenizer.json`` beside it, such
            a file itself, or a GGUF file.
        model: the folder or file of the model, if the tokenizer is from elsewhere: the
            tokens that end its texts do so beside those of `path`.

    Raises:
        ModuleNotFoundError: if the package tokenizers is not installed.
        CheckpointError: if there is no tokenizer, or it is damaged or of a kind that is
            not read.
    """
    path = pathlib.Path(path)
    found = _load(path)
    if model is None:
        return found
    return Tokenizer(found.inner, found.stop | stop_tokens.stop_tokens(model))


def _check_unicode(text: str) -> None:
    """Raises ValueError for surrogates, as Python makes of bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text is not valid Unicode: {text[error.start]!r} at {error.start} is "
            "a byte that was no UTF-8, or half of a character"
        ) from error


def _load(path: pathlib.Path) -> Tokenizer:
    package = extras.package("tokenizers")
    if path.suffix == ".json":
        return _of_file(package, path, stop_tokens.of_configs(path.parent))
    folder = path if path.is_dir() else path.parent
    file = folder / "tokenizer.json"
    if path.suffix == ".gguf" or not file.is_file():
        source = load_quantized(path)
        if source.method == "gguf":
            return Tokenizer(*gguf_tokenizer.of_metadata(source.metadata, str(path)))
    return _of_file(package, file, stop_tokens.stop_tokens(path))


def _of_file(package: Any, path: pathlib.Path, stop: frozenset[int]) -> Tokenizer:
    if not path.is_file():
        raise CheckpointError(
            f"{path.parent} has no tokenizer.json: name one (--tokenizer), such as the "
            "package transformers writes with save_pretrained"
        )
    try:
        inner = package.Tokenizer.from_file(str(path))
    except Exception as error:  # The package raises nothing narrower.
        raise CheckpointError(f"{path} is no tokenizer: {error}") from error
    # Training leaves them in the file; they are for batches, and change prompts.
    inner.no_padding()
    inner.no_truncation()
    return Tokenizer(inner, stop)
