"""Settings of the whole suite."""

import os
import pathlib

import hypothesis

# The same examples at every run where a failure could not be looked into.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")

# Most of the time of the suite is compilation. Programs are found again by what they
# say and how they are compiled: by the other process of `-n 2`, by the processes that
# tests start, and by the next run. JAX reads these when it is first imported.
_CACHE = pathlib.Path(__file__).parent.parent / ".jax_cache"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Needs eight devices; `test_sharding.py` runs it where there are as many.
collect_ignore = ["on_eight_devices.py"]
