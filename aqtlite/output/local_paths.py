"""Paths of files, which are local ones."""

import os
import pathlib
import re

# `pathlib.Path` makes one slash of two. A single letter is a drive, not a scheme.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def check_local(path: str | os.PathLike[str]) -> None:
    """Checks that a path is no address, as of an object in a bucket, and not in ``~``.

    Opening them as paths would write below local folders named ``gs:`` and ``~``.

    >>> check_local("runs/3/model.onnx")
    >>> check_local("gs://bucket/model.onnx")
    Traceback (most recent call last):
        ...
    ValueError: gs://bucket/model.onnx is an address (gs://): only local and mounted \
paths are read and written

    Args:
        path: path of the file or folder, possibly an address that `pathlib.Path` has
            shortened to ``gs:/bucket``.

    Raises:
        ValueError: if it begins with a scheme such as ``gs://``, ``s3://`` or
            ``file://``, or with ``~`` or ``~user``, which shells replace by a home.
    """
    name = os.fspath(path)
    found = _ADDRESS.match(name)
    if found is not None:
        raise ValueError(
            f"{name} is an address ({found[1]}://): only local and mounted paths are "
            "read and written"
        )
    first = pathlib.PurePath(name).parts[:1]
    if first == ("~",) or any(os.path.expanduser(one) != one for one in first):
        raise ValueError(
            f"{name} begins with {first[0]}, which a shell replaces by a home only "
            "where it is not quoted: write the whole path"
        )
