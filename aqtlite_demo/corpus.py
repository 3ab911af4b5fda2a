"""Text as tokens, split into training and validation."""

import dataclasses
import os
import pathlib
import sysconfig
import zlib
from collections.abc import Iterator

import numpy as np

from aqtlite.errors import UserError
from aqtlite_demo import stories
from aqtlite_demo.tokens import Tokenizer

VOCABULARY = 256
"""Number of tokens of a text whose tokens are its bytes."""

MAX_BYTES = 8 * 2**20
"""Limit on the bytes read, enough for any run of the demo."""

STORIES = 8_000
"""Number of stories to learn from: more tokens than a run of the demo takes."""

SAMPLE_BYTES = 2**18
"""Bytes that pairs are counted in."""

HELD_OUT = 10
"""Inverse of the share of the text held out for validation."""

_DOT = "\N{MIDDLE DOT}"

_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text as arrays of tokens; the tail is held out for validation."""

    name: str
    training: np.ndarray
    validation: np.ndarray

    def batches(self, batch: int, length: int, seed: int) -> Iterator[np.ndarray]:
        """Endless training batches.

        Args:
            batch: sequences per batch.
            length: input tokens per sequence; rows have one more, since targets are the
                inputs shifted by one.
            seed: seed that determines the batches.

        Yields:
            int32, ``(batch, length + 1)``.
        """
        generator = np.random.default_rng(seed)
        while True:
            starts = generator.integers(len(self.training) - length, size=batch)
            yield _windows(self.training, starts, length)

    def validation_batches(
        self, count: int, batch: int, length: int
    ) -> list[np.ndarray]:
        """Fixed batches, with windows spread evenly over the held-out text."""
        last = len(self.validation) - length - 1
        starts = np.linspace(0, last, count * batch).astype(np.int64)
        return [
            _windows(self.validation, starts[i * batch : (i + 1) * batch], length)
            for i in range(count)
        ]


def load(text: pathlib.Path | None, length: int) -> tuple[Corpus, Tokenizer]:
    """Reads the demo's text, and learns its tokens.

    Args:
        text: file, or None for stories.
        length: context length in tokens, which must fit into the held-out text.

    Raises:
        UserError: if the text cannot be read or is too short.
    """
    if text is None:
        name, data = "short stories", stories.write(STORIES).encode()
    else:
        name, data = text.name, _read(text)
    tokenizer = Tokenizer.learn(data[:SAMPLE_BYTES])
    return _split(name, tokenizer.encode(data), length), tokenizer


def standard_library(length: int) -> Corpus:
    """The bytes of the source of Python's standard library, for benchmarks.

    Args:
        length: as for `load`.
    """
    data = np.frombuffer(_standard_library(), np.uint8)
    return _split("Python standard library", data, length)


def _split(name: str, tokens: np.ndarray, length: int) -> Corpus:
    held_out = len(tokens) // HELD_OUT
    if held_out < length + 1:
        raise UserError(
            f"the text ({name}) has {len(tokens)} tokens; --length {length} needs at "
            f"least {HELD_OUT * (length + 1)}"
        )
    return Corpus(name, training=tokens[:-held_out], validation=tokens[-held_out:])


def to_text(data: bytes) -> str:
    """Decodes bytes to printable text; other characters become middle dots."""
    text = data.decode("utf-8", errors="replace")
    text = text.replace("\N{REPLACEMENT CHARACTER}", _DOT)
    return "".join(c if c.isprintable() or c == "\n" else _DOT for c in text)


def _windows(tokens: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    return tokens[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def _read(path: pathlib.Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES)
    except OSError as e:
        raise UserError(f"cannot read --text {path}: {e.strerror}") from e


def _standard_library() -> bytes:
    """The first `MAX_BYTES` of the standard library's modules.

    Ordered by a checksum of their paths: reproducible, but shuffled, so that the
    held-out tail resembles the rest. (Ordered by name, the tail would be the tables of
    `encodings`.)
    """
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        paths += [pathlib.Path(folder, name) for name in files if name.endswith(".py")]

    def order(path: pathlib.Path) -> tuple[int, str]:
        name = path.relative_to(root).as_posix()
        return zlib.crc32(name.encode()), name

    data = bytearray()
    for path in sorted(paths, key=order):
        try:
            data += path.read_bytes()
        except OSError:
            continue  # Modules that cannot be read are left out.
        if len(data) >= MAX_BYTES:
            break
    if not data:
        raise UserError(f"found no source of the Python standard library in {root}")
    return bytes(data[:MAX_BYTES])
