"""Training side by side."""

import itertools

import numpy as np

from aqtlite import config
from aqtlite.demo import training
from aqtlite.demo.model import Transformer


def test_models_learn_from_the_same_batches():
    sizes = dict(layers=1, width=16, heads=2, length=8)
    models = {
        "float32": Transformer(**sizes),
        "int8": Transformer(**sizes, cfg=config.fully_quantized()),
    }
    batch = np.arange(36, dtype=np.int32).reshape(4, 9)
    seen = []
    runs = training.train_side_by_side(
        models,
        itertools.repeat(batch),
        [batch],
        steps=20,
        lr=1e-2,
        seed=0,
        on_step=lambda step, runs: seen.append(step),
    )
    assert seen == list(range(1, 21))
    # The same initial weights and batch; then quantization takes its own path.
    assert abs(runs["float32"].losses[0] - runs["int8"].losses[0]) < 0.02
    for run in runs.values():
        assert len(run.losses) == len(run.seconds) == 20
        assert [step for step, _ in run.curve] == list(range(2, 21, 2))
        assert run.validation_loss < run.losses[0] - 1
    difference = runs["float32"].validation_loss - runs["int8"].validation_loss
    assert 0 < abs(difference) < 0.1


def test_step_time_leaves_out_the_compilation():
    trained = training.Trained(None, None, seconds=[9.0, 1.0, 2.0, 3.0])
    assert trained.step_seconds == 2.0
    assert training.Trained(None, None, seconds=[9.0]).step_seconds == 9.0
