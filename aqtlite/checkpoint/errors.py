"""How reading and converting checkpoints fails."""

from aqtlite.errors import UserError


class CheckpointError(UserError, ValueError):
    """A checkpoint, or what was asked of it, is not right; says which and why.

    One line, whatever the errors of other libraries that it quotes are.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(line.strip() for line in message.splitlines()))
