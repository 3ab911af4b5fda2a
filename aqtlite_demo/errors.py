"""Errors of the demo."""

from aqtlite.errors import UserError


class ServingError(UserError):
    """A failure of the serving process."""

    exit_code = 1
