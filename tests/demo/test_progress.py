"""Progress on a terminal and elsewhere."""

import io

import pytest
import rich.console

from aqtlite_demo import progress, training

pytestmark = pytest.mark.code("quick")

RUNS = {"int8": training.Trained(None, None, losses=[2.5])}

NAMES = ["float32", "int8"]


def _console(terminal):
    return rich.console.Console(file=io.StringIO(), force_terminal=terminal, width=100)


def test_plain_lines_come_every_tenth():
    console = _console(terminal=False)
    with progress.training_progress(console, 200, NAMES) as on_step:
        for step in range(1, 201):
            on_step(step, RUNS)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 1 + progress.PLAIN_LINES
    assert lines[0].startswith("compiling the training steps of float32 and int8")
    assert lines[1].startswith("step 20 of 200: loss int8 2.500 (")
    assert lines[-1].startswith("step 200 of 200: ")


def test_a_terminal_gets_a_bar():
    console = _console(terminal=True)
    with progress.training_progress(console, 20, NAMES) as on_step:
        for step in range(1, 21):
            on_step(step, RUNS)
    shown = console.file.getvalue()
    assert "compiling the training steps of float32 and int8" in shown
    assert "20/20" in shown and " 0/20" not in shown
    assert "loss int8 2.500" in shown
    assert "step 20 of 20" not in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_working_says_what(terminal):
    console = _console(terminal)
    with progress.working(console, "serving"):
        pass
    assert "serving" in console.file.getvalue()


def test_say_keeps_brackets_and_long_lines_as_they_are():
    console = rich.console.Console(file=io.StringIO(), markup=False, width=20)
    line = "a [bold] line that is wider than the console"
    progress.say(console, line)
    assert console.file.getvalue() == line + "\n"
