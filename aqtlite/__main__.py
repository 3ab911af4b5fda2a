"""``python -m aqtlite``: the command line without an installed script."""

import sys

from aqtlite import cli

if __name__ == "__main__":
    sys.exit(cli.main())
