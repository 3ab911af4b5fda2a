"""Types of files by their content: the machine's own files, labelled by extension."""

import json
import os
import pathlib
import sysconfig
import zlib
from collections.abc import Sequence

import numpy as np

from benchmarks.pretrained.tasks.task import Arrays, Task, task_of

LABELS = {
    "batch": ("bat",),
    "bmp": ("bmp",),
    "bzip": ("bz2",),
    "c": ("c", "h"),
    "cmake": ("cmake",),
    "cpp": ("cc", "cpp", "hpp"),
    "css": ("css",),
    "csv": ("csv",),
    "elf": ("so",),
    "gif": ("gif",),
    "gzip": ("gz",),
    "html": ("html",),
    "ini": ("cfg", "ini"),
    "ipynb": ("ipynb",),
    "java": ("java",),
    "javascript": ("js",),
    "jpeg": ("jpg",),
    "json": ("json",),
    "lua": ("lua",),
    "markdown": ("md",),
    "npy": ("npy",),
    "npz": ("npz",),
    "pdf": ("pdf",),
    "pem": ("pem",),
    "perl": ("pl", "pm"),
    "png": ("png",),
    "proto": ("proto",),
    "python": ("py",),
    "pythonbytecode": ("pyc",),
    "rst": ("rst",),
    "ruby": ("rb",),
    "scss": ("scss",),
    "shell": ("sh",),
    "sql": ("sql",),
    "svg": ("svg",),
    "tcl": ("tcl",),
    "toml": ("toml",),
    "ttf": ("ttf",),
    "typescript": ("ts",),
    "wav": ("wav",),
    "woff": ("woff",),
    "woff2": ("woff2",),
    "xml": ("xml",),
    "xz": ("xz",),
    "yaml": ("yaml", "yml"),
    "zip": ("whl", "zip"),
}
"""Extensions of each label of the network."""

OF_EACH = 24
"""Files of a label, at most."""

BATCH = 32


def task(network: pathlib.Path, quick: bool) -> Task:
    """Files of the interpreter, its packages and the system."""
    settings = json.loads(network.with_name("config.min.json").read_text())
    names = settings["target_labels_space"]
    found = [
        (features, names.index(label))
        for label, contents in labelled(2 if quick else OF_EACH).items()
        for content in contents
        if (features := features_of(content, settings)) is not None
    ]
    order = np.random.default_rng(0).permutation(len(found))
    examples = [found[i] for i in order]
    held = len(examples) // 5 // BATCH * BATCH or BATCH
    count = (len(examples) - held) // BATCH * BATCH
    measured = examples[held : held + count]
    labels = np.array([label for _, label in measured])

    def score(outputs: Sequence[Arrays]) -> float:
        predicted = np.concatenate([one[0].argmax(-1) for one in outputs])
        return float(100 * (predicted == labels).mean())

    held_out = [x for x, _ in examples[:held]]
    return task_of(held_out, [x for x, _ in measured], BATCH, score)


def labelled(of_each: int) -> dict[str, list[bytes]]:
    """Contents of files of each label, no two alike.

    The choice depends on the names of the files alone.
    """
    labels = {one: label for label, group in LABELS.items() for one in group}
    own = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    found: dict[str, list[tuple[int, str]]] = {label: [] for label in sorted(LABELS)}
    for folder in dict.fromkeys([*own, "/usr/share", "/usr/lib"]):
        for directory, _, files in os.walk(folder):
            for name in files:
                label = labels.get(name.rpartition(".")[2].lower())
                if label is not None and "." in name:
                    path = os.path.join(directory, name)
                    key = os.path.relpath(path, folder)
                    found[label].append((zlib.crc32(key.encode()), path))
    contents = {}
    for label, paths in found.items():
        taken: dict[bytes, None] = {}
        for _, path in sorted(paths):
            if len(taken) == of_each:
                break
            try:
                taken[pathlib.Path(path).read_bytes()] = None
            except OSError:
                continue  # A broken link, or a file of another user.
        contents[label] = list(taken)
    return contents


def features_of(content: bytes, settings: dict) -> np.ndarray | None:
    """The bytes at both ends of a file, as the network expects them.

    None for a file of a few bytes, for which the network is not asked.
    """
    size, padding = settings["beg_size"], settings["padding_token"]
    first = content[: settings["block_size"]].lstrip()[:size]
    last = content[-settings["block_size"] :].rstrip()[-size:]
    if len(first) < settings["min_file_size_for_dl"]:
        return None
    features = np.full(2 * size, padding, np.int32)
    features[: len(first)] = np.frombuffer(first, np.uint8)
    features[2 * size - len(last) :] = np.frombuffer(last, np.uint8)
    return features
