"""Which frames of a recording have speech: synthesized speech in noise."""

import pathlib
from collections.abc import Sequence

import numpy as np
import scipy.signal

from benchmarks.pretrained.tasks import speech
from benchmarks.pretrained.tasks import text as text_lib
from benchmarks.pretrained.tasks.task import Arrays, Task

RATE, FRAME, CONTEXT, FRAMES = 16000, 512, 64, 128
"""Samples in a second and in a frame, those before a frame that the network is given,
and frames in a recording."""

CLIPS, CALIBRATION = 80, 8

VOICES = ("en-us", "en-gb-scotland", "de", "fr", "es", "it")

SILENT = 0.03
"""Root mean square of a frame of silence, at most, over that of all speech."""


def task(network: pathlib.Path, quick: bool) -> Task:
    """Recordings of several phrases with pauses, in white and in pink noise."""
    del network
    rng = np.random.default_rng(2)
    held = [_example(rng)[0] for _ in range(2 if quick else CALIBRATION)]
    examples = [_example(rng) for _ in range(2 if quick else CLIPS)]
    labels = np.concatenate([label for _, label in examples])

    def score(outputs: Sequence[Arrays]) -> float:
        found = np.concatenate([np.ravel(one[0]) for one in outputs]) > 0.5
        return float(100 * (found == labels).mean())

    return Task(held, [x for x, _ in examples], held[:4], score)


def _example(rng: np.random.Generator) -> tuple[Arrays, np.ndarray]:
    clean = _recording(rng)
    power = np.sqrt((clean.reshape(FRAMES, FRAME) ** 2).mean(1))
    labels = power > SILENT * np.sqrt((clean**2).sum() / max(1, (clean != 0).sum()))
    ratio = rng.uniform(0, 20)  # of signal to noise, in decibels
    noise = _noise(rng, clean.size)
    noise *= np.sqrt((clean**2).mean()) / np.sqrt((noise**2).mean())
    mixed = clean + noise * 10 ** (-ratio / 20)
    mixed *= rng.uniform(0.1, 0.9) / np.abs(mixed).max()
    padded = np.concatenate([np.zeros(CONTEXT), mixed])
    frames = np.lib.stride_tricks.sliding_window_view(padded, CONTEXT + FRAME)[::FRAME]
    state = np.zeros((1, 1, 128), np.float32)
    return (frames.astype(np.float32), state, state), labels


def _recording(rng: np.random.Generator) -> np.ndarray:
    """Phrases with pauses between them, one voice for all."""
    samples = np.zeros(FRAMES * FRAME)
    voice = str(rng.choice(VOICES))
    at = int(rng.uniform(0, 0.8) * RATE)
    while at < samples.size:
        spoken = speech.spoken(
            text_lib.phrase(rng, 24).lower(),
            voice=voice,
            speed=int(rng.integers(130, 220)),
            pitch=int(rng.integers(25, 75)),
        )
        spoken = scipy.signal.resample_poly(spoken, 320, 441)  # 22,050 Hz to 16,000
        part = spoken[: samples.size - at]
        samples[at : at + part.size] = part
        at += part.size + int(rng.uniform(0.3, 1.5) * RATE)
    return samples


def _noise(rng: np.random.Generator, count: int) -> np.ndarray:
    """White noise, or noise whose power falls with the frequency."""
    white = rng.normal(size=count)
    if rng.random() < 0.5:
        return white
    spectrum = np.fft.rfft(white)
    spectrum /= np.sqrt(np.maximum(1, np.arange(spectrum.size)))
    return np.fft.irfft(spectrum, count)
