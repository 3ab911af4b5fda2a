"""Options of a run of the suite."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Options:
    """Sizes of the workloads, and limits on repetition."""

    quick: bool = False
    """Use tiny sizes to check that everything runs; the figures mean little."""
    repeats: int = 15
    """Maximum number of rounds per comparison."""
    seconds: float = 15.0
    """Time per comparison after which no round is started."""
    synchronous: bool = False
    """Have JAX run programs on CPUs in the thread that calls them."""
