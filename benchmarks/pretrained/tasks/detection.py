"""Detection of the lines of a page of text."""

import pathlib
from collections.abc import Sequence

import numpy as np
import scipy.ndimage

from benchmarks.pretrained.tasks import text as text_lib
from benchmarks.pretrained.tasks.task import Arrays, Task, task_of

SIDE, TRIES = 480, 40
"""Side of a page, in pixels, and tries to find a place for another line."""

BATCH, PAGES, CALIBRATION = 2, 24, 4

THRESHOLD, LEAST_SCORE, LEAST_SIDE, UNCLIP = 0.3, 0.5, 3, 1.6
"""Those of rapidocr: of a pixel's probability, of a box's mean; the smallest side of a
box, in pixels, and by how much a box is larger than what is found."""

Box = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels."""


def task(network: pathlib.Path, quick: bool) -> Task:
    """Pages with lines of several sizes and fonts, on a common background."""
    del network
    rng = np.random.default_rng(3)
    held = [_example(rng)[0] for _ in range(BATCH if quick else CALIBRATION)]
    examples = [_example(rng) for _ in range(BATCH if quick else PAGES)]

    def score(outputs: Sequence[Arrays]) -> float:
        found = [boxes(page[0]) for one in outputs for page in one[0]]
        expected = [truth for _, truth in examples]
        right = sum(map(matches, found, expected))
        return 200 * right / (sum(map(len, found)) + sum(map(len, expected)))

    return task_of(held, [x for x, _ in examples], BATCH, score)


def _example(rng: np.random.Generator) -> tuple[np.ndarray, list[Box]]:
    from PIL import Image, ImageDraw

    dark = rng.random() < 0.2
    ground = rng.integers(0, 60, 3) if dark else rng.integers(190, 256, 3)
    image = Image.new("RGB", (SIDE, SIDE), tuple(map(int, ground)))
    draw = ImageDraw.Draw(image)
    taken: list[Box] = []
    for _ in range(TRIES):
        drawn = text_lib.font(
            str(rng.choice(text_lib.FONTS)), int(rng.integers(14, 40))
        )
        text = text_lib.phrase(rng, int(rng.integers(5, 24)))
        left, top = rng.integers(8, SIDE - 60, 2).tolist()
        box = draw.textbbox((left, top), text, drawn)
        tallest = draw.textbbox((left, top), "Ágj", drawn)
        box = (box[0], tallest[1], box[2], tallest[3])
        gap = 12
        is_free = all(
            box[0] - gap > one[2]
            or box[2] + gap < one[0]
            or box[1] - gap > one[3]
            or box[3] + gap < one[1]
            for one in taken
        )
        if is_free and box[2] < SIDE - 8 and box[3] < SIDE - 8:
            ink = rng.integers(190, 256, 3) if dark else rng.integers(0, 100, 3)
            draw.text((left, top), text, tuple(map(int, ink)), drawn)
            taken.append(box)
    pixels = text_lib.degraded(rng, np.asarray(image))
    return text_lib.normalized(pixels), taken


def boxes(probabilities: np.ndarray) -> list[Box]:
    """The upright boxes of regions of text, as rapidocr finds them.

    Args:
        probabilities: of each pixel to belong to text.
    """
    is_text = scipy.ndimage.binary_dilation(probabilities > THRESHOLD, np.ones((2, 2)))
    labels, _ = scipy.ndimage.label(is_text, np.ones((3, 3)))
    found = []
    for rows, columns in scipy.ndimage.find_objects(labels):
        height, width = rows.stop - rows.start, columns.stop - columns.start
        if min(height, width) < LEAST_SIDE:
            continue
        if probabilities[rows, columns].mean() < LEAST_SCORE:
            continue
        grown = height * width * UNCLIP / (2 * (height + width))
        found.append(
            (
                columns.start - grown,
                rows.start - grown,
                columns.stop + grown,
                rows.stop + grown,
            )
        )
    return found


def matches(found: Sequence[Box], expected: Sequence[Box]) -> int:
    """Expected boxes with a found one that overlaps in half of their union.

    >>> matches([(0, 0, 10, 10), (50, 50, 60, 60)], [(0, 0, 10, 8)])
    1
    """
    left = list(found)
    count = 0
    for box in expected:
        best = max(left, key=lambda one: overlap(one, box), default=None)
        if best is not None and overlap(best, box) >= 0.5:
            left.remove(best)
            count += 1
    return count


def overlap(a: Box, b: Box) -> float:
    """The area of the intersection over that of the union."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    shared = max(0.0, width) * max(0.0, height)
    area = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b))
    return shared / (area - shared)
