"""Types of command-line arguments."""

import argparse


def natural(text: str) -> int:
    """Parses an int, 0 or above."""
    return _at_least(0, text)


def positive(text: str) -> int:
    """Parses an int, 1 or above."""
    return _at_least(1, text)


def _at_least(smallest: int, text: str) -> int:
    value = int(text)
    if value < smallest:
        raise argparse.ArgumentTypeError(f"must be at least {smallest}, got {value}")
    return value
