"""The networks: where they are installed, and their tasks."""

import dataclasses
import importlib.metadata
import pathlib
from collections.abc import Callable

from aqtlite import edge
from benchmarks.pretrained.tasks import (
    detection,
    direction,
    file_types,
    pitch,
    recognition,
    voice,
)
from benchmarks.pretrained.tasks.task import Task


class NotInstalledError(Exception):
    """The package of a network is not installed; the message says how to install it."""


@dataclasses.dataclass(frozen=True)
class Network:
    """A network that comes with a package."""

    name: str
    what: str
    """What it does, and what is right."""
    package: str
    file: str
    """The ONNX file in the package."""
    task: Callable[[pathlib.Path, bool], Task]
    """Function of the path of the file, and whether a few items are enough."""
    is_in_extra: bool = True
    """Whether the extra `pretrained` installs the package."""
    exactness: float = 1e-4
    """Difference of the outputs in JAX from those of onnxruntime, at most."""
    edge_rules: tuple[edge.Rule, ...] = ()
    """What stays in float in full-integer files, as `edge.calibrate` advises."""

    def path(self) -> pathlib.Path:
        """The file, found without importing the package.

        Raises:
            NotInstalledError: if there is no such package, or none with this file.
        """
        packages = "'aqtlite[pretrained]'" if self.is_in_extra else self.package
        how = f"pip install {'' if self.is_in_extra else '--no-deps '}{packages}"
        try:
            distribution = importlib.metadata.distribution(self.package)
        except importlib.metadata.PackageNotFoundError:
            raise NotInstalledError(
                f"{self.name}: {self.package} is not installed; {how}"
            ) from None
        path = pathlib.Path(str(distribution.locate_file(self.file)))
        if not path.exists():
            raise NotInstalledError(
                f"{self.name}: {self.package} {distribution.version} has no {self.file}"
            )
        return path


_OCR = "rapidocr_onnxruntime/models"

NETWORKS = (
    Network(
        "files",
        "Magika's types of files; files with the right type",
        "magika",
        "magika/models/standard_v3_3/model.onnx",
        file_types.task,
        exactness=5e-3,  # onnxruntime is 0.0025 off float64 in places, JAX 0.00025
        edge_rules=(edge.Rule(path=".*/LayerNorm_.*", is_float=True),),
    ),
    Network(
        "recognition",
        "PP-OCRv4's recognition of text; 100 less the character error rate",
        "rapidocr-onnxruntime",
        f"{_OCR}/ch_PP-OCRv4_rec_infer.onnx",
        recognition.task,
        exactness=1e-3,  # onnxruntime is 0.0006 off float64 in places, JAX 0.0002
    ),
    Network(
        "direction",
        "PP-OCR's direction of text; lines with the right direction",
        "rapidocr-onnxruntime",
        f"{_OCR}/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        direction.task,
    ),
    Network(
        "voice",
        "Silero's voice detector; frames with the right label",
        "silero-vad",
        "silero_vad/data/silero_vad_16k_sequence.onnx",
        voice.task,
        is_in_extra=False,
    ),
    Network(
        "detection",
        "PP-OCRv4's detection of text; F1 of boxes",
        "rapidocr-onnxruntime",
        f"{_OCR}/ch_PP-OCRv4_det_infer.onnx",
        detection.task,
        edge_rules=(edge.Rule(path=r"p2o\.ConvTranspose\..*", is_float=True),),
    ),
    Network(
        "pitch",
        "Basic Pitch's notes; F1 of notes",
        "basic-pitch",
        "basic_pitch/saved_models/icassp_2022/nmp.onnx",
        pitch.task,
        is_in_extra=False,
        exactness=1e-3,  # onnxruntime is 0.0006 off float64 in places, JAX 0.00007
        edge_rules=(edge.Rule(path="model_1/normalized_log_1/.*", is_float=True),),
    ),
)
