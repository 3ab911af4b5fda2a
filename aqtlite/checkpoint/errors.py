"""Errors of reading and converting checkpoints."""

from aqtlite.errors import UserError


class CheckpointError(UserError, ValueError):
    """An unusable checkpoint or request, and the reason.

    The message is one line, even if it quotes another library's error.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(line.strip() for line in message.splitlines()))
