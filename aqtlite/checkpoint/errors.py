"""How reading and converting checkpoints fails."""

from aqtlite.errors import UserError


class CheckpointError(UserError, ValueError):
    """A checkpoint, or what was asked of it, is not right; says which and why."""
