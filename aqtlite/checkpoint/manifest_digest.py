"""The checksum of a manifest, part of its JSON: a changed one is not read."""

import json
import zlib
from collections.abc import Mapping
from typing import Any

from aqtlite.checkpoint.errors import CheckpointError

_KEY = "crc32"


def added(data: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the checksum of a manifest to it, of a length that depends on no values."""
    return {**data, _KEY: _digest(data)}


def check(data: Mapping[str, Any], where: str) -> None:
    """Checks the checksum of a manifest; those written before had none.

    Args:
        data: the manifest, parsed.
        where: path of the checkpoint, for error messages.

    Raises:
        CheckpointError: if the manifest is not what was written.
    """
    if _KEY not in data:
        return
    found = _digest({key: value for key, value in data.items() if key != _KEY})
    if data[_KEY] != found:
        raise CheckpointError(
            f"the manifest of {where} is damaged: its checksum is {found}, and was "
            f"{data[_KEY]} when it was written"
        )


def _digest(data: Mapping[str, Any]) -> str:
    """CRC-32 of the text with sorted keys, whatever the layout of the file's."""
    return f"{zlib.crc32(json.dumps(data, sort_keys=True).encode()):08x}"
