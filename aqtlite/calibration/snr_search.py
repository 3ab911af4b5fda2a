"""Calibration by a search for the best signal-to-noise ratio."""

import dataclasses

from aqtlite.calibration import mse_search


@dataclasses.dataclass(frozen=True)
class SnrSearch(mse_search.MseSearch):
    """The fraction of the largest magnitude or range with the best signal-to-noise.

    ``bound = c * max(|x|)`` with the ``c`` of `candidates` for which ``log(1 + sum(x^2)
    / sum((x - quantized(x, c))^2))`` is largest, chosen for each channel: the search of
    AQT's ``SnrBasedAutoCalibration``.

    The signal of a channel is the same for all candidates, so that the best ratio is at
    the least squared error: this is `MseSearch`, with its rules for ties and its cost,
    under the name that users of AQT look for. Of equal errors AQT takes the candidate
    that comes first in its list.

    >>> import jax.numpy as jnp
    >>> from aqtlite import numerics
    >>> x = jnp.array([[4.0] + 99 * [0.5]])
    >>> grid = numerics.IntSymmetric(bits=2)
    >>> SnrSearch((1.0, 0.5, 0.25)).range(x, (1,), grid, ()).high.tolist()
    [[1.0]]
    """
