"""Recognition of rendered lines of text."""

import pathlib
from collections.abc import Sequence

import numpy as np

from benchmarks.pretrained.tasks import text as text_lib
from benchmarks.pretrained.tasks.task import Arrays, Task, task_of

WIDTH, LONGEST, SIZE = 320, 16, 32
"""Width of the input, longest text, and size of its font, in pixels."""

BATCH, LINES, CALIBRATION = 8, 120, 32


def task(network: pathlib.Path, quick: bool) -> Task:
    """Lines of words and numbers, in several fonts, degraded."""
    count = BATCH if quick else LINES
    rng = np.random.default_rng(0)
    held = [_example(rng)[0] for _ in range(BATCH if quick else CALIBRATION)]
    examples = [_example(rng) for _ in range(count)]
    alphabet = characters(network)

    def score(outputs: Sequence[Arrays]) -> float:
        read = [decoded(row, alphabet) for one in outputs for row in one[0]]
        expected = [text for _, text in examples]
        wrong = sum(map(edits, read, expected))
        return 100 - 100 * wrong / sum(map(len, expected))

    return task_of(held, [x for x, _ in examples], BATCH, score)


def _example(rng: np.random.Generator) -> tuple[np.ndarray, str]:
    text = text_lib.phrase(rng, LONGEST)
    image, _ = text_lib.line(rng, text, SIZE)
    return text_lib.strip(text_lib.degraded(rng, image), WIDTH), text


def characters(network: pathlib.Path) -> list[str]:
    """The characters of the network's classes, the first of which is the blank."""
    import onnx

    model = onnx.load(str(network))
    metadata = {one.key: one.value for one in model.metadata_props}
    return ["", *metadata["character"].splitlines(), " "]


def decoded(probabilities: np.ndarray, alphabet: Sequence[str]) -> str:
    """The text of a path of connectionist temporal classification.

    >>> decoded(np.eye(3)[[0, 1, 1, 0, 1, 2, 2]], ["", "a", "b"])
    'aab'
    """
    best = probabilities.argmax(-1)
    first = np.concatenate([[True], best[1:] != best[:-1]])
    return "".join(alphabet[i] for i in best[first])


def edits(a: str, b: str) -> int:
    """The least number of characters to insert, delete or replace.

    >>> edits("kitten", "sitting")
    3
    """
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = (
                row[j],
                min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y)),
            )
    return row[-1]
