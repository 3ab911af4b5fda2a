"""What the benchmarks take from AQT and Qwix, or one line on how to install them."""

try:
    import qwix
    from aqt.jax.v2 import aqt_conv_general, aqt_ragged_dot
    from aqt.jax.v2 import config as aqt_config
    from aqt.jax.v2.flax import aqt_flax
    from qwix._src import model as qwix_model
    from qwix._src.core import (
        conv_general_qt,
        dot_general_qt,
        ragged_dot_qt,
        stochastic_rounding,
    )
    from qwix._src.providers import ptq
    from qwix.contrib import awq, gptq, qep
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in ("aqt", "qwix"):
        raise
    raise SystemExit(
        "error: the benchmarks compare with AQT and Qwix (packages aqtp and qwix), and "
        f"there is no {error.name}: pip install -e '.[test]'"
    ) from None

PACKAGES = ("aqtp", "qwix")
"""Packages of the peers, as pip knows them."""

__all__ = [
    "PACKAGES",
    "aqt_config",
    "aqt_conv_general",
    "aqt_flax",
    "aqt_ragged_dot",
    "awq",
    "conv_general_qt",
    "dot_general_qt",
    "gptq",
    "ptq",
    "qep",
    "qwix",
    "qwix_model",
    "ragged_dot_qt",
    "stochastic_rounding",
]
