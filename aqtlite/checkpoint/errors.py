"""Errors raised by reading and converting checkpoints."""

from aqtlite.errors import UserError


class CheckpointError(UserError, ValueError):
    """Error for an unusable checkpoint or request.

    The message is a single line, even if it quotes another library's error.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(line.strip() for line in message.splitlines()))
