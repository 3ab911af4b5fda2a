import errno
import os

import pytest


@pytest.fixture
def full_disk(monkeypatch):
    """A disk without room for what is flushed to it."""

    def fail(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
