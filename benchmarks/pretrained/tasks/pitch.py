"""Transcription of music: synthesized notes."""

import pathlib
from collections.abc import Sequence

import numpy as np

from benchmarks.pretrained.tasks.task import Arrays, Task

RATE, SAMPLES, HOP, FRAMES, LOWEST = 22050, 43844, 256, 172, 21
"""Samples in a second, in a window and in a frame, frames of a window, and the MIDI
number of the lowest pitch."""

CLIPS, CALIBRATION = 40, 4

ONSET, SOUNDING, GAP, SHORTEST = 0.5, 0.3, 11, 11
"""Those of Basic Pitch: probabilities of an onset and of a note, at least, and frames
of the silence after a note, and of a note."""

LATE = 0.05
"""By how many seconds an onset can be off."""

OF_NOTES, OF_ONSETS = "StatefulPartitionedCall:1", "StatefulPartitionedCall:2"

Note = tuple[int, float]
"""Pitch, from 0, and seconds of the onset."""


def task(network: pathlib.Path, quick: bool) -> Task:
    """Windows of two seconds with notes of several timbres, in noise."""
    import onnx

    outputs = [one.name for one in onnx.load(str(network)).graph.output]
    onset, note = outputs.index(OF_ONSETS), outputs.index(OF_NOTES)
    rng = np.random.default_rng(4)
    held = [_example(rng)[0] for _ in range(1 if quick else CALIBRATION)]
    examples = [_example(rng) for _ in range(2 if quick else CLIPS)]

    def score(outputs: Sequence[Arrays]) -> float:
        found = [
            notes(*pair)
            for one in outputs
            for pair in zip(one[onset], one[note], strict=True)
        ]
        expected = [truth for _, truth in examples]
        right = sum(map(matches, found, expected))
        return 200 * right / (sum(map(len, found)) + sum(map(len, expected)))

    return Task(held, [x for x, _ in examples], held[:2], score)


def _example(rng: np.random.Generator) -> tuple[Arrays, list[Note]]:
    samples = np.zeros(SAMPLES)
    truth: list[Note] = []
    timbre = rng.uniform(1.5, 3.5)  # How fast harmonics get weaker.
    decay = rng.uniform(2.0, 8.0)
    at = rng.uniform(0.1, 0.3)
    while at < SAMPLES / RATE - 0.3:
        for pitch in rng.choice(np.arange(27, 60), rng.integers(1, 3), replace=False):
            samples += _tone(int(pitch), at, rng.uniform(0.4, 1), timbre, decay)
            truth.append((int(pitch), at))
        at += rng.uniform(0.18, 0.5)
    samples += rng.normal(size=SAMPLES) * samples.std() * rng.uniform(0.003, 0.05)
    samples *= rng.uniform(0.3, 0.9) / np.abs(samples).max()
    return (samples.astype(np.float32)[None, :, None],), truth


def _tone(
    pitch: int, start: float, strength: float, timbre: float, decay: float
) -> np.ndarray:
    """A tone of ten harmonics, with an attack of 10 ms, for half a second."""
    frequency = 440 * 2 ** ((pitch + LOWEST - 69) / 12)
    times = np.arange(SAMPLES) / RATE - start
    harmonics = np.arange(1, 11)[:, None]
    waves = np.sin(2 * np.pi * frequency * harmonics * times) / harmonics**timbre
    waves = np.where(frequency * harmonics < RATE / 2, waves, 0).sum(0)
    attack = np.clip(times / 0.01, 0, 1)
    release = np.clip((0.5 - times) / 0.03, 0, 1)
    return strength * waves * attack * release * np.exp(-decay * np.maximum(times, 0))


def notes(onsets: np.ndarray, sounding: np.ndarray) -> list[Note]:
    """The notes that begin with a peak of an onset and sound long enough.

    As Basic Pitch's: from the last to the first, where a note takes the frames that it
    sounds in, so that an earlier one of its pitch or a neighbour ends before.

    Args:
        onsets: probabilities of onsets, frames by pitches.
        sounding: probabilities that pitches sound.
    """
    padded = np.pad(onsets, ((1, 1), (0, 0)))
    is_peak = (onsets > ONSET) & (onsets >= padded[:-2]) & (onsets > padded[2:])
    left = sounding.copy()
    found = []
    for first, pitch in np.argwhere(is_peak)[::-1].tolist():
        silent = left[first:, pitch] < SOUNDING
        runs = np.convolve(silent, np.ones(GAP), "valid") == GAP
        length = int(runs.argmax()) if runs.any() else len(silent)
        if length >= SHORTEST:
            left[first : first + length, max(0, pitch - 1) : pitch + 2] = 0
            found.append((pitch, first * HOP / RATE))
    return found


def matches(found: Sequence[Note], expected: Sequence[Note]) -> int:
    """Expected notes with a found one of their pitch at about their time.

    >>> matches([(40, 0.51), (41, 0.5)], [(40, 0.5)])
    1
    """
    left = list(found)
    count = 0
    for pitch, at in expected:
        near = [one for one in left if one[0] == pitch and abs(one[1] - at) <= LATE]
        if near:
            left.remove(min(near, key=lambda one: abs(one[1] - at)))
            count += 1
    return count
