"""Options of a run of the suite."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Options:
    """Sizes of the workloads, and limits on their repetition."""

    quick: bool = False
    """Tiny sizes, for a check that everything runs; the figures mean little."""
    repeats: int = 15
    """Rounds of every comparison, at most."""
    seconds: float = 15.0
    """Total time of a comparison's rounds after which none is started."""
