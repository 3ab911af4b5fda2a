"""Speech that espeak-ng makes, from the package espeakng-loader."""

import ctypes
import functools

import numpy as np

RATE = 22050
"""Samples in a second."""

_SYNCHRONOUS, _UTF8, _RATE_PARAMETER, _PITCH = 2, 1, 1, 3


@functools.cache
def _library() -> ctypes.CDLL:
    import espeakng_loader

    library = ctypes.CDLL(espeakng_loader.get_library_path())
    data = espeakng_loader.get_data_path().encode()
    rate = library.espeak_Initialize(_SYNCHRONOUS, 0, data, 0)
    if rate != RATE:
        raise RuntimeError(f"espeak-ng samples at {rate} Hz, and not at {RATE}")
    return library


def spoken(text: str, *, voice: str, speed: int, pitch: int) -> np.ndarray:
    """Speaks a text.

    Args:
        text: what to speak.
        voice: name of a voice, such as "en-us" or "en-us+f2".
        speed: words in a minute.
        pitch: from 0 to 100.

    Returns:
        Samples from -1 to 1, `RATE` in a second.

    Raises:
        ValueError: if there is no such voice.
    """
    library = _library()
    taken: list[np.ndarray] = []

    @ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
    )
    def take(samples, count, events):
        del events
        if samples and count > 0:
            taken.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    library.espeak_SetSynthCallback(take)
    if library.espeak_SetVoiceByName(voice.encode()):
        raise ValueError(f"espeak-ng has no voice {voice!r}")
    library.espeak_SetParameter(_RATE_PARAMETER, speed, 0)
    library.espeak_SetParameter(_PITCH, pitch, 0)
    data = text.encode()
    library.espeak_Synth(data, len(data) + 1, 0, 0, 0, _UTF8, None, None)
    library.espeak_Synchronize()
    return np.concatenate(taken).astype(np.float32) / 32768
