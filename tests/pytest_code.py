"""Plugin of pytest: tests by the code that XLA makes of their programs.

Of a test marked ``code("quick")``, programs may be compiled in a quarter of the time,
to slower code with other last bits. It compares within tolerances, or looks at plans,
states, errors and files; where it compares bit for bit, it is to see which arrays were
stored, loaded or read. So does a doctest, of which a few digits are printed. All others
are compiled as users compile: they show that bits stay what they are when XLA fuses
programs, as those of rounding, noise and contractions, and of models that are served.
``--code quick`` and ``--code users`` run the ones and the others; without it, all are
compiled as users compile. The mark of a function counts before the mark of its file.
"""

import os
import pathlib
import re

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--code", choices=["users", "quick"], help="code that XLA makes")


def pytest_configure(config: pytest.Config) -> None:
    asked = config.getoption("code")
    if asked is None:
        return
    from tests import common  # imports JAX, which conftest.py sets first

    # The code of users stays the same in one module for LLVM.
    flags = common.QUICK_FLAGS if asked == "quick" else common.ONE_MODULE_FLAG
    # XLA reads them at the first compilation, in the processes started from here too.
    given = os.environ.get("XLA_FLAGS", "")
    if flags not in given:
        os.environ["XLA_FLAGS"] = f"{given} {flags}".strip()


def pytest_ignore_collect(
    collection_path: pathlib.Path, config: pytest.Config
) -> bool | None:
    """Leaves out files that hold no test that is asked for, so that none imports them.

    Some import other libraries, and make models and data.
    """
    asked = config.getoption("code")
    if asked is None or collection_path.suffix != ".py":
        return None
    if not collection_path.name.startswith("test_"):
        return True if asked == "users" else None
    text = collection_path.read_text("utf-8")
    if config.getoption("markexpr") == "not slow" and _marks_all(text, "slow"):
        return True
    if asked == "quick":
        return None if 'code("quick")' in text else True
    has_others = 'code("users")' in text
    return True if _marks_all(text, 'code("quick")') and not has_others else None


def _marks_all(text: str, mark: str) -> bool:
    """Whether all tests of a file have a mark."""
    before = r"^pytestmark = (pytest\.mark\.|\[[^\]]*)"
    return re.search(before + re.escape(mark), text, re.MULTILINE) is not None


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    asked = config.getoption("code")
    if asked is None:
        return
    selected, others = [], []
    for item in items:
        (selected if _is_quick(item) == (asked == "quick") else others).append(item)
    items[:] = selected
    config.hook.pytest_deselected(items=others)


def _is_quick(item: pytest.Item) -> bool:
    if isinstance(item, pytest.DoctestItem):
        return True
    mark = item.get_closest_marker("code")
    return mark is not None and mark.args == ("quick",)
