"""The memory that a compiled program takes."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory of one device, in bytes, as the compiler planned it."""

    arguments: int
    outputs: int
    temporary: int
    """Largest sum of values between arguments and outputs at one time."""

    aliased: int
    """Bytes of arguments that outputs replace (donated ones)."""

    @property
    def peak(self) -> int:
        """Arguments, outputs and temporary values together, aliases once."""
        return self.arguments + self.outputs + self.temporary - self.aliased

    @classmethod
    def of(cls, compiled: Any) -> "Memory | None":
        """Returns the memory of a compiled program; None if the compiler tells none."""
        stats = compiled.memory_analysis()
        if stats is None:
            return None
        return cls(
            stats.argument_size_in_bytes,
            stats.output_size_in_bytes,
            stats.temp_size_in_bytes,
            stats.alias_size_in_bytes,
        )
