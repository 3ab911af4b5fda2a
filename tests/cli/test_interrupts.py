"""Interruptions that arrive where Python ignores what is raised."""

import dataclasses
import gc
import signal
import threading

import pytest

from aqtlite import cli
from aqtlite.errors import UserError

pytestmark = [
    pytest.mark.code("quick"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def handler():
    """Python's handler, which a process in the background of a shell has not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def run(command):
    return cli.main(["presets"], [dataclasses.replace(cli.COMMANDS[0], run=command)])


def in_a_collection():
    def callback(phase, info):
        gc.callbacks.remove(callback)
        signal.raise_signal(signal.SIGINT)

    gc.callbacks.append(callback)
    gc.collect()


def in_a_finalizer():
    class Finalized:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    Finalized()


@pytest.mark.parametrize("interrupt", [in_a_collection, in_a_finalizer])
def test_a_command_that_goes_on(interrupt, capsys):
    done = []

    def command(args):
        interrupt()
        done.append(args)
        return 0

    assert run(command) == 130
    assert done
    words = "interrupted. The command had ended by then, and what it wrote is there"
    assert capsys.readouterr().err == f"aqtlite presets: {words}\n"


@pytest.mark.parametrize("raised", [UserError, OSError, RuntimeError])
def test_a_command_that_fails_of_it(raised, capsys):
    def command(args):
        in_a_collection()
        raise raised("of what was interrupted")

    assert run(command) == 130
    words = "interrupted. Run the same command to start over"
    assert capsys.readouterr().err == f"aqtlite presets: {words}\n"


def test_a_command_that_is_interrupted_at_once(capsys):
    def command(args):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:
            error.add_note("A part is done")
            raise

    assert run(command) == 130
    assert "interrupted. A part is done\n" in capsys.readouterr().err


def test_a_command_that_is_not_interrupted():
    assert run(lambda args: 0) == 0
    with pytest.raises(RuntimeError, match="of its own"):
        run(lambda args: _raise(RuntimeError("of its own")))


def test_signals_that_the_caller_handles_or_ignores_are_left_to_it():
    for mine in (signal.SIG_IGN, lambda number, frame: None):
        signal.signal(signal.SIGINT, mine)
        assert run(lambda args: signal.raise_signal(signal.SIGINT) or 0) == 0
        assert signal.signal(signal.SIGINT, signal.default_int_handler) is mine


def test_another_thread():
    codes = []
    thread = threading.Thread(target=lambda: codes.append(run(lambda args: 0)))
    thread.start()
    thread.join()
    assert codes == [0]


def _raise(error):
    raise error
