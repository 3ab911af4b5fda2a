"""Calibration by a search for the best signal-to-noise ratio."""

import dataclasses

from aqtlite.calibration import mse_search


@dataclasses.dataclass(frozen=True)
class SnrSearch(mse_search.MseSearch):
    """The fraction of the largest magnitude or range with the best SNR.

    ``bound = c * max(|x|)``, where ``c`` is the element of `candidates` with the
    largest ``log(1 + sum(x^2) / sum((x - quantized(x, c))^2))``, chosen per channel:
    the search of AQT's ``SnrBasedAutoCalibration``.

    The signal of a channel is the same for all candidates, so the best ratio is at the
    least squared error: this is `MseSearch` (including ties and cost) under the name
    known to users of AQT. On a tie, AQT chooses the first candidate in the list.

    >>> import jax.numpy as jnp
    >>> from aqtlite import numerics
    >>> x = jnp.array([[4.0] + 99 * [0.5]])
    >>> grid = numerics.IntSymmetric(bits=2)
    >>> SnrSearch((1.0, 0.5, 0.25)).range(x, (1,), grid, ()).high.tolist()
    [[1.0]]
    """
