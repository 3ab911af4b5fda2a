"""Warnings, and errors that the command line reports in one line."""


class UserError(Exception):
    """A mistake that the user can fix; the message is one line."""

    exit_code = 2


class CostWarning(UserWarning):
    """A costly calibration, meant to run once on weights, runs at every training step.

    Issued when a gradient is traced, once per config path with such a calibration.
    ``warnings.simplefilter("ignore", CostWarning)`` silences it.
    """
