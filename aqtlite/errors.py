"""Errors that the command line reports in one line."""


class UserError(Exception):
    """Something the user can put right; `str` of it is one line that says what."""

    exit_code = 2
