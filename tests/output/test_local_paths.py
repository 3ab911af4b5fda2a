import pathlib

import pytest

from aqtlite.output.local_paths import check_local

pytestmark = pytest.mark.code("quick")


@pytest.mark.parametrize(
    ("path", "scheme"),
    [
        ("gs://bucket/m.onnx", "gs"),
        ("s3://bucket/m.onnx", "s3"),
        ("file:///tmp/m.onnx", "file"),
        ("HTTPS://host/m.onnx", "HTTPS"),
        (pathlib.Path("gs://bucket/m.onnx"), "gs"),
        (pathlib.Path("file:///tmp/m.onnx"), "file"),
    ],
)
def test_addresses_are_refused(path, scheme):
    with pytest.raises(ValueError, match=rf"\({scheme}://\).* local and mounted path"):
        check_local(path)


@pytest.mark.parametrize("path", ["~", "~/run/m.onnx", "~root/m.onnx"])
def test_homes_are_refused(path, monkeypatch):
    for home in ("/home/me", "~"):
        monkeypatch.setenv("HOME", home)
        for one in (path, pathlib.Path(path)):
            with pytest.raises(ValueError, match="begins with ~.* write the whole"):
                check_local(one)


@pytest.mark.parametrize(
    "path",
    [
        *("m.onnx", "/tmp/m.onnx", "run:3/m.onnx", "a/gs://b/m.onnx", "C:/m.onnx"),
        *("", "run/~/m.onnx", "/~/m.onnx", "~$m.onnx", "m.onnx~", "~nobody.knows/m"),
    ],
)
def test_paths_are_taken(path):
    check_local(path)
    check_local(pathlib.Path(path))
