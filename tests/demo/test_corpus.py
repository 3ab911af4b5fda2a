"""The demo's text."""

import numpy as np
import pytest

from aqtlite.errors import UserError
from aqtlite_demo import corpus, stories
from aqtlite_demo.tokens import Tokenizer

pytestmark = pytest.mark.code("quick")


def _file(tmp_path, data):
    path = tmp_path / "text.txt"
    path.write_bytes(data)
    return path


@pytest.fixture
def counting(tmp_path):
    """A text in which no pair of bytes is frequent."""
    text, _ = corpus.load(_file(tmp_path, bytes(range(200))), length=16)
    return text


def test_the_tail_is_held_out(tmp_path):
    data = stories.write(20).encode()
    loaded, tokenizer = corpus.load(_file(tmp_path, data), length=8)
    parts = (loaded.training, loaded.validation)
    assert b"".join(map(tokenizer.decode, parts)) == data
    assert len(loaded.validation) == sum(map(len, parts)) // 10


@pytest.mark.parametrize("data", [b"", b"too short"])
def test_a_short_text_is_refused(tmp_path, data):
    with pytest.raises(UserError, match=r"has \d tokens.* at least 170"):
        corpus.load(_file(tmp_path, data), length=16)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot read --text"):
        corpus.load(tmp_path, length=16)


def test_batches_are_windows_and_follow_the_seed(counting):
    one, other = counting.batches(3, 16, seed=1), counting.batches(3, 16, seed=1)
    for _ in range(50):
        batch = next(one)
        np.testing.assert_array_equal(batch, next(other))
        assert batch.shape == (3, 17)
        assert batch.dtype == np.int32
        assert batch.max() < 180
        np.testing.assert_array_equal(np.diff(batch), 1)
    assert not np.array_equal(next(one), next(counting.batches(3, 16, seed=2)))


def test_validation_batches_cover_the_held_out_text(counting):
    batches = counting.validation_batches(2, 4, 16)
    assert [batch.shape for batch in batches] == [(4, 17)] * 2
    assert batches[0].min() == 180
    assert batches[-1].max() == 199


def test_smallest_text_gives_batches(tmp_path):
    loaded, _ = corpus.load(_file(tmp_path, bytes(range(170))), length=16)
    assert next(loaded.batches(1, 16, seed=0)).shape == (1, 17)
    assert len(loaded.validation_batches(2, 3, 16)) == 2


def test_stories_are_enough_for_a_run():
    loaded, tokenizer = corpus.load(None, 128)
    assert len(loaded.training) > 360 * 8 * 128
    assert b" was a " in tokenizer.decode(loaded.validation)


@pytest.mark.parametrize(
    "text", [b"", b"a", b"aaaaabaaa aa", b"one two one two", bytes(range(256)) * 3]
)
def test_tokens_hold_the_text(text):
    tokenizer = Tokenizer.learn(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    other = b"none of it: \xff\x00"
    assert tokenizer.decode(tokenizer.encode(other)) == other


def test_no_token_is_longer_than_a_word():
    tokenizer = Tokenizer.learn(b"to be or not to be " * 20)
    words = [tokenizer.decode(np.array([token])) for token in range(512)]
    assert b" be" in words
    assert all(word.rfind(b" ") < 1 for word in words)


def test_standard_library_is_deterministic():
    one, other = corpus.standard_library(16), corpus.standard_library(16)
    assert len(one.training) > 100_000
    np.testing.assert_array_equal(one.training, other.training)
    assert b"def " in one.validation.tobytes()


def test_to_text_shows_any_bytes():
    shown = corpus.to_text(bytes([104, 105, 10, 0, 255, 27]))
    assert shown.startswith("hi\n\N{MIDDLE DOT}")
    assert shown.count("\N{MIDDLE DOT}") == 3
