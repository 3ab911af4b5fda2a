"""How the demo fails."""

from aqtlite.errors import UserError


class ServingError(UserError):
    """The serving process failed: not the user's doing, but worth one clear line."""

    exit_code = 1
