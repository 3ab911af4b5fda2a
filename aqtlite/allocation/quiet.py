"""Keeps a line that HiGHS prints out of the standard output.

HiGHS prints it whenever it repairs a solution, whatever its options say: a line of its
developers' that 1.12 still has (ERGO-Code/HiGHS issue 2783). Should SciPy have a later
version at least, this file can go.
"""

import contextlib
import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator

STRAY = b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();\n"
"""The line."""

_STDOUT = 1


@contextlib.contextmanager
def without_stray_lines() -> Iterator[None]:
    """Takes `STRAY` out of what the process prints inside the context.

    All else that is printed meanwhile, by other threads perhaps, is printed afterwards.
    """
    sys.stdout.flush()
    buffered = ctypes.CDLL(None)  # Of the C library, which HiGHS prints with.
    buffered.fflush(None)
    with tempfile.TemporaryFile() as kept:
        stdout = os.dup(_STDOUT)
        os.dup2(kept.fileno(), _STDOUT)
        try:
            yield
        finally:
            buffered.fflush(None)
            os.dup2(stdout, _STDOUT)
            os.close(stdout)
            kept.seek(0)
            text = kept.read().replace(STRAY, b"")
            while text:
                text = text[os.write(_STDOUT, text) :]
