"""Errors that the command line reports in one line."""


class UserError(Exception):
    """Something the user can put right; `str` of it is one line that says what."""

    exit_code = 2


class ServingError(UserError):
    """The serving process failed: not the user's doing, but worth one clear line."""

    exit_code = 1
