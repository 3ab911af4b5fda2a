"""Errors that the command line reports in one line, and warnings."""


class UserError(Exception):
    """Something the user can put right; `str` of it is one line that says what."""

    exit_code = 2


class CostWarning(UserWarning):
    """A calibration that is meant for weights, once, is paid at every training step.

    It is given when a gradient is traced, once for each path of a config that has such
    a calibration. ``warnings.simplefilter("ignore", CostWarning)`` silences it.
    """
