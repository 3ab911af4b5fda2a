"""Settings of the whole suite."""

import os

import hypothesis

# The same examples at every run where a failure could not be looked into.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")

# Needs eight devices; `test_sharding.py` runs it where there are as many.
collect_ignore = ["on_eight_devices.py"]
