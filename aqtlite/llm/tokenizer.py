"""Tokenizers that a checkpoint holds."""

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from aqtlite import extras
from aqtlite.checkpoint import CheckpointError, load_quantized
from aqtlite.checkpoint.quantized_formats.settings import read_json
from aqtlite.llm import gguf_tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer, and the tokens that end a text."""

    inner: Any
    """A `tokenizers.Tokenizer`."""

    stop: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with those that the model has at the beginning."""
        found: list[int] = self.inner.encode(text).ids
        return found

    def encode_rendered(self, text: str) -> list[int]:
        """The tokens of a text that contains its special tokens, as a rendered chat."""
        found: list[int] = self.inner.encode(text, add_special_tokens=False).ids
        return found

    def decoded(
        self, tokens: Iterable[int], after: Sequence[int] = ()
    ) -> Iterator[str]:
        """The text of tokens, piece by piece: whole characters, as soon as known.

        Args:
            tokens: the tokens.
            after: tokens whose text comes before, such as those of a prompt that is
                continued. Many tokenizers leave out the space at the start of a text,
                which is none in the middle of one.
        """
        # The last piece's tokens, which say how the next ones join, and those since.
        held, joined = list(after), len(after)
        before = self._text(held)
        for token in tokens:
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


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """Loads the tokenizer of a checkpoint.

    Args:
        path: a folder or file of Hugging Face, with ``tokenizer.json`` beside it, such
            a file itself, or a GGUF file.

    Raises:
        ModuleNotFoundError: if the package tokenizers is not installed.
        CheckpointError: if there is no tokenizer, or it is damaged or of a kind that is
            not read.
    """
    path = pathlib.Path(path)
    package = extras.package("tokenizers")
    if path.suffix != ".json":
        folder = path if path.is_dir() else path.parent
        if path.suffix == ".gguf" or not (folder / "tokenizer.json").is_file():
            source = load_quantized(path)
            if source.method == "gguf":
                inner, stop = gguf_tokenizer.of_metadata(source.metadata, str(path))
                return Tokenizer(inner, stop)
        path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path.parent} has no tokenizer.json: name one (--tokenizer), such as the "
            "package transformers writes with save_pretrained"
        )
    try:
        inner = package.Tokenizer.from_file(str(path))
    except Exception as error:  # The package raises nothing narrower.
        raise CheckpointError(f"{path} is no tokenizer: {error}") from error
    return Tokenizer(inner, _stop(path.parent))


def _stop(folder: pathlib.Path) -> frozenset[int]:
    """The tokens that end a text, of the first config that names any."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        found = read_json(file).get("eos_token_id") if file.is_file() else None
        if found is not None:
            return _numbers(found, file)
    return frozenset()


def _numbers(found: Any, file: pathlib.Path) -> frozenset[int]:
    numbers = found if isinstance(found, list) else [found]
    if not all(type(one) is int for one in numbers):
        raise CheckpointError(f"{file}: eos_token_id has to be numbers, got {found!r}")
    return frozenset(numbers)
