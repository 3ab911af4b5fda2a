"""Weights that an interrupted conversion left, taken by the next one."""

import copy

import numpy as np
import pytest

from aqtlite import checkpoint
from aqtlite.checkpoint import replacement, staging
from tests.checkpoint.support import MODEL, VARIABLES, refuses, save
from tests.flax.support import X

pytestmark = pytest.mark.code("quick")


class Crash(BaseException):
    """The process ends here: nothing catches it."""


def crash(*args):
    raise Crash


def with_nan():
    variables = copy.deepcopy(VARIABLES)
    kernel = np.array(variables["params"]["Dense_1"]["kernel"])
    kernel[3, 1] = np.nan
    variables["params"]["Dense_1"]["kernel"] = kernel
    return variables


def test_nan_that_was_allowed_is_not_resumed_without(tmp_path, monkeypatch):
    args = (save(tmp_path / "float", with_nan(), "msgpack"), tmp_path / "out", MODEL, X)
    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(replacement, "publish", crash)
        checkpoint.convert_checkpoint(*args, allow_nonfinite=True)
    refuses("Dense_1/kernel in .* holds NaN", checkpoint.convert_checkpoint, *args)
    assert not (tmp_path / "out").exists()
    checkpoint.convert_checkpoint(*args, allow_nonfinite=True)
    assert (tmp_path / "out").exists()


def test_allowing_nan_goes_on_from_what_is_finished(tmp_path, monkeypatch):
    args = (save(tmp_path / "float", with_nan(), "msgpack"), tmp_path / "out", MODEL, X)
    put, made = staging.Staging.put, []

    def counted(self, index, *rest):
        made.append(index)
        return put(self, index, *rest)

    monkeypatch.setattr(staging.Staging, "put", counted)
    refuses("holds NaN", checkpoint.convert_checkpoint, *args)
    before = len(made)
    checkpoint.convert_checkpoint(*args, allow_nonfinite=True)
    assert len(made) == len(set(made)) > before
