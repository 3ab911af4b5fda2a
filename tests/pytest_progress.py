"""Plugin of pytest: how far the tests are, in place of a dot for each.

``python -m tests`` loads it where the tests run on other processes.
"""

import contextlib

import pytest
import rich.console

from tests.progress import shown


class _Progress:
    """Counts finished tests in the process that hands them out."""

    def __init__(self, config: pytest.Config):
        writer = config.get_terminal_writer()
        self._console = rich.console.Console(
            file=writer, force_terminal=writer.hasmarkup, width=writer.fullwidth
        )
        self._stack = contextlib.ExitStack()
        self._on_done = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids):
        """Every process finds all tests, and runs some of them."""
        del node
        if self._on_done is None:
            self._on_done = self._stack.enter_context(shown(self._console, len(ids)))

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            self._on_done(report.nodeid.partition("[")[0])

    def pytest_sessionfinish(self):
        self._stack.close()

    def pytest_report_teststatus(self, report):
        """No letters; what fails is named at once."""
        if report.when == "call" and report.passed:
            return "passed", "", ""
        return None


@pytest.hookimpl(trylast=True)  # after what writes to the terminal
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        config.pluginmanager.register(_Progress(config))
