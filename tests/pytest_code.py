"""Plugin of pytest: tests by the code that XLA makes of their programs.

Of a test marked ``code("quick")``, programs may be compiled in a quarter of the time,
to slower code with other last bits: it compares within tolerances, or no results of
compiled programs. All others are compiled as users compile. ``--code quick`` and
``--code users`` run the ones and the others; without it, all are compiled as users
compile. The mark of a function counts before the mark of its file.
"""

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--code", choices=["users", "quick"], help="code that XLA makes")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("code") != "quick":
        return
    from tests.common import QUICK_FLAGS  # imports JAX, which conftest.py sets first

    # XLA reads them at the first compilation, in the processes started from here too.
    given = os.environ.get("XLA_FLAGS", "")
    if QUICK_FLAGS not in given:
        os.environ["XLA_FLAGS"] = f"{given} {QUICK_FLAGS}".strip()


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    asked = config.getoption("code")
    if asked is None:
        return
    selected, others = [], []
    for item in items:
        mark = item.get_closest_marker("code")
        is_quick = mark is not None and mark.args == ("quick",)
        (selected if is_quick == (asked == "quick") else others).append(item)
    items[:] = selected
    config.hook.pytest_deselected(items=others)
