"""What a run of the suite was asked for."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Options:
    """How large the workloads are, and how long they are measured."""

    quick: bool = False
    """Tiny sizes, to see that everything runs: the figures say little."""
    repeats: int = 15
    """At most so many rounds of every comparison."""
    seconds: float = 15.0
    """A comparison starts no further round once its rounds took this long in total."""
