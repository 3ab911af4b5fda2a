"""The files that packages wrote, with something changed."""

import json
import pathlib

OTHERS = pathlib.Path(__file__).parent.parent / "formats_written_by_others"
CASES = sorted(path.parent.name for path in OTHERS.glob("*/model.safetensors"))
LAYER = "model.layers.0.mlp.up_proj"


def tensors_of(case):
    """Dtype, shape and bytes of each tensor, by name."""
    data = (OTHERS / case / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    return {
        name: (one["dtype"], one["shape"], data[start:][slice(*one["data_offsets"])])
        for name, one in header.items()
        if name != "__metadata__"
    }


def config_of(case):
    """The name of the config, and what it holds; None without one."""
    for file in (OTHERS / case).glob("*config.json"):
        return file.name, json.loads(file.read_text())
    return None


def write(folder, tensors, config):
    """Writes a folder; returns it."""
    folder.mkdir(exist_ok=True)
    header, position = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        stop = position + len(data)
        offsets = [position, stop]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        position = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    parts = [one[2] for one in tensors.values()]
    file = folder / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))
    if config is not None:
        (folder / config[0]).write_text(json.dumps(config[1]))
    return folder
