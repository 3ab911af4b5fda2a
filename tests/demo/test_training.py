"""What training tells of itself; `test_run.py` has its models learn."""

import pytest

from aqtlite_demo import training

pytestmark = pytest.mark.code("quick")


def test_step_time_leaves_out_the_compilation():
    trained = training.Trained(None, None, seconds=[9.0, 1.0, 2.0, 3.0])
    assert trained.step_seconds == 2.0
    assert training.Trained(None, None, seconds=[9.0]).step_seconds == 9.0
