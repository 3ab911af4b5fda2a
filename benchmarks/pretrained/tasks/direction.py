"""Whether a line of text is upside down."""

import pathlib
from collections.abc import Sequence

import numpy as np

from benchmarks.pretrained.tasks import text as text_lib
from benchmarks.pretrained.tasks.task import Arrays, Task, task_of

WIDTH, LONGEST, SIZE = 192, 12, 28
"""Width of the input, longest text, and size of its font, in pixels."""

BATCH, LINES, CALIBRATION = 16, 320, 64


def task(network: pathlib.Path, quick: bool) -> Task:
    """Degraded lines, of which one half is turned by 180 degrees."""
    del network
    rng = np.random.default_rng(1)
    held = [_example(rng, i % 2) for i in range(BATCH if quick else CALIBRATION)]
    turned = np.arange(2 * BATCH if quick else LINES) % 2
    examples = [_example(rng, one) for one in turned]

    def score(outputs: Sequence[Arrays]) -> float:
        predicted = np.concatenate([one[0].argmax(-1) for one in outputs])
        return float(100 * (predicted == turned).mean())

    return task_of(held, examples, BATCH, score)


def _example(rng: np.random.Generator, turned: int) -> np.ndarray:
    image, _ = text_lib.line(rng, text_lib.phrase(rng, LONGEST), SIZE)
    pixels = text_lib.degraded(rng, image)
    return text_lib.strip(pixels[::-1, ::-1] if turned else pixels, WIDTH)
