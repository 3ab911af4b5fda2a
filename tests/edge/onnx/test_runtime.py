import errno
import resource

import jax.numpy as jnp
import pytest

from aqtlite import edge
from aqtlite.edge.onnx import runtime
from tests.common import normal

pytestmark = pytest.mark.code("quick")


@pytest.fixture
def data(tmp_path):
    """A file of more than 64 KiB."""
    path = tmp_path / "m.onnx"
    w, x = jnp.asarray(normal((256, 256))), normal((2, 256), 1)
    edge.export(lambda w, x: x @ w, w, None, x, path)
    return path.read_bytes()


def test_a_limit_on_the_size_of_files_is_what_is_reported(data):
    """As a full disk: onnxruntime writes a file, too."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*\.onnx'") as raised:
            runtime.optimized(data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.errno == errno.EFBIG


def test_what_onnxruntime_refuses_is_still_refused(data):
    with pytest.raises(ValueError, match="onnxruntime refuses the file: "):
        runtime.optimized(data[: len(data) // 2])
