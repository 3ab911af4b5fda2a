"""Tests of other people's models run where their extra is installed."""

import importlib.util

_PACKAGES = {
    "test_chat.py": "transformers",
    "test_flaxdiff.py": "flaxdiff",
    "test_keras.py": "keras",
    "test_maxtext.py": "maxtext",
    "test_tunix.py": "tunix",
}
"""The package that a file needs; the extra `models` installs them."""

collect_ignore = [
    name
    for name, package in _PACKAGES.items()
    if importlib.util.find_spec(package) is None
]
