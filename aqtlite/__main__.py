"""``python -m aqtlite``: the command line without an installed script."""

from aqtlite import cli

if __name__ == "__main__":
    cli.run()
