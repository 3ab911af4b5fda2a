import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.code("quick")

# An interpreter that does not come to an end. The pipe closes when its process ends.
ENDLESS = """
import time

pipe = open({!r}, "w")
pipe.write("runs\\n")
pipe.flush()
time.sleep(30)
pipe.write("goes on")
"""
PARENT = "from aqtlite.edge.litert import converter; converter.check_runs(b'')"


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_an_export_that_is_killed_leaves_no_process_and_no_file(by, tmp_path):
    pipe, stub = tmp_path / "pipe", tmp_path / "path" / "ai_edge_litert"
    os.mkfifo(pipe)
    stub.mkdir(parents=True)
    (stub / "__init__.py").touch()
    (stub / "interpreter.py").write_text(ENDLESS.format(str(pipe)))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    path = [str(stub.parent), *filter(None, sys.path)]
    variables = {"PYTHONPATH": os.pathsep.join(path), "TMPDIR": str(temporary)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], env={**os.environ, **variables}
    )
    with pipe.open() as said:
        assert said.readline() == "runs\n"
        parent.send_signal(by)
        assert parent.wait() == -by
        assert said.read() == ""
    assert not list(temporary.iterdir())
