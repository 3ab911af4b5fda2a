"""Fixtures of contractions."""

import jax
import pytest

from aqtlite.lowering.forms import panel_products


@pytest.fixture
def without_kernel(monkeypatch):
    """Disables the kernel when called."""

    def disable():
        monkeypatch.setattr(panel_products, "runs_here", lambda: False)
        jax.clear_caches()

    yield disable
    jax.clear_caches()
