"""The demo's text."""

import numpy as np
import pytest

from aqtlite.demo import corpus
from aqtlite.errors import UserError


def _file(tmp_path, data):
    path = tmp_path / "text.txt"
    path.write_bytes(data)
    return path


def test_the_tail_is_held_out(tmp_path):
    data = bytes(range(200)) * 2
    loaded = corpus.load(_file(tmp_path, data), length=16)
    assert loaded.training.tobytes() + loaded.validation.tobytes() == data
    assert len(loaded.validation) == 40


@pytest.mark.parametrize("data", [b"", b"too short"])
def test_a_short_text_is_refused(tmp_path, data):
    with pytest.raises(UserError, match=f"has {len(data)} bytes.* at least 170"):
        corpus.load(_file(tmp_path, data), length=16)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot read --text"):
        corpus.load(tmp_path, length=16)


def test_batches_are_windows_and_follow_the_seed(tmp_path):
    data = bytes(range(200))
    loaded = corpus.load(_file(tmp_path, data), length=16)
    one, other = loaded.batches(3, 16, seed=1), loaded.batches(3, 16, seed=1)
    for _ in range(50):
        batch = next(one)
        np.testing.assert_array_equal(batch, next(other))
        assert batch.shape == (3, 17)
        assert batch.dtype == np.int32
        assert batch.max() < 180
        np.testing.assert_array_equal(np.diff(batch), 1)
    assert not np.array_equal(next(one), next(loaded.batches(3, 16, seed=2)))


def test_validation_batches_cover_the_held_out_text(tmp_path):
    data = bytes(range(200))
    loaded = corpus.load(_file(tmp_path, data), length=16)
    batches = loaded.validation_batches(2, 4, 16)
    assert [batch.shape for batch in batches] == [(4, 17)] * 2
    assert batches[0].min() == 180
    assert batches[-1].max() == 199


def test_smallest_text_gives_batches(tmp_path):
    loaded = corpus.load(_file(tmp_path, bytes(170)), length=16)
    assert next(loaded.batches(1, 16, seed=0)).shape == (1, 17)
    assert len(loaded.validation_batches(2, 3, 16)) == 2


def test_standard_library_is_deterministic():
    one, other = corpus.load(None, 16), corpus.load(None, 16)
    assert len(one.training) > 100_000
    np.testing.assert_array_equal(one.training, other.training)
    assert b"def " in one.validation.tobytes()


def test_to_text_shows_any_bytes():
    shown = corpus.to_text(np.array([104, 105, 10, 0, 255, 27]))
    assert shown.startswith("hi\n\N{MIDDLE DOT}")
    assert shown.count("\N{MIDDLE DOT}") == 3
