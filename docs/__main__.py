"""Build the documentation as a site: ``python -m docs [options of mkdocs build]``.

Needs the extra `docs`, and writes to site/. Any warning, such as that of a broken link,
is an error.
"""

import os
import subprocess
import sys

command = [sys.executable, "-m", "mkdocs", "build", "--strict", *sys.argv[1:]]
# The theme's note on its successor.
sys.exit(subprocess.call(command, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}))
