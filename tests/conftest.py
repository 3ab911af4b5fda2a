"""Settings of the whole suite."""

import collections
import gc
import os
import pathlib
import zlib

import hypothesis
import pytest

# The same examples at every run where a failure could not be looked into.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")

# Most of the time of the suite is compilation. Programs are found again by what they
# say and how they are compiled: by the other process of `-n 2`, by the processes that
# tests start, and by the next run. JAX reads these when it is first imported.
_TESTS = pathlib.Path(__file__).parent
_CACHE = _TESTS.parent / ".jax_cache"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Needs eight devices; `test_sharding.py` runs it where there are as many.
collect_ignore = ["on_eight_devices.py"]

# Of a test with more cases, so many are quick: the first and the last.
_QUICK_CASES = 2

_COMPILED = "/jax/core/compile/backend_compile_duration"
_MOST_PROGRAMS = 1000  # kept from one file to the next, of a few MB each


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, help="largest number of cases of each test")


@pytest.hookimpl(tryfirst=True)  # before what is slow is deselected
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leaves most cases of a test to the slow part, and sorts files.

    Files that start processes or train come first, as they are long. The others follow
    from the last folder to the first, so that short files are at the end, doctests
    last of all, from the first folder on: at the end, one process waits for what the
    other has begun.
    """
    if (most := config.getoption("cases")) is not None:
        counted = [item for item in items if not item.get_closest_marker("every_case")]
        left_out = {*_cases_beyond(most, counted)}
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]
    quick = [item for item in items if not item.get_closest_marker("slow")]
    for item in _cases_beyond(_QUICK_CASES, quick):
        item.add_marker("slow")
    long = (_TESTS, _TESTS / "benchmarks")
    items.sort(key=lambda item: item.path)
    doctests = [item for item in items if isinstance(item, pytest.DoctestItem)]
    tests = [item for item in items if not isinstance(item, pytest.DoctestItem)]
    tests.sort(key=lambda item: item.path, reverse=True)
    tests.sort(key=lambda item: item.path.parent not in long)
    items[:] = [*tests, *doctests]


def _cases_beyond(count: int, items: list[pytest.Item]) -> list[pytest.Item]:
    """All but `count` of each test's cases: first, last, some between; or any one."""
    tests = collections.defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    beyond = []
    for name, cases in tests.items():
        last = len(cases) - 1
        if count == 1:
            kept = {zlib.crc32(name.encode()) % len(cases)}
        else:
            kept = {i * last // (count - 1) for i in range(count)}
        beyond += [case for i, case in enumerate(cases) if i not in kept]
    return beyond


def pytest_collection_finish() -> None:
    """Keep the collector from looking at what stays, and at what is new so often.

    Tracing makes many objects that live as long as the programs do.
    """
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.fixture(scope="session")
def events():
    """Counts the events that JAX tells of."""
    import jax  # not before its settings above are made

    counts: collections.Counter[str] = collections.Counter()
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: counts.update([event])
    )
    return counts


@pytest.fixture(scope="module", autouse=True)
def bounded_memory(events):
    """Gives back the compiled programs of finished files once they are many."""
    import jax

    yield
    if events[_COMPILED] > _MOST_PROGRAMS:
        jax.clear_caches()
        events.clear()
