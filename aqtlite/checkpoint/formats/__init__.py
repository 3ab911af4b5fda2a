"""Readers and writers of checkpoint formats.

A reader lists arrays by path and reads one at a time; a writer writes one at a time.
Read `base` first.
"""

from aqtlite.checkpoint.formats.base import Reader, Writer
from aqtlite.checkpoint.formats.paths import local_path, open_reader, writer_for
from aqtlite.checkpoint.formats.subtree import Subtree

__all__ = ["Reader", "Subtree", "Writer", "local_path", "open_reader", "writer_for"]
