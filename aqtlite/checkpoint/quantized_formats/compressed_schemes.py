"""The groups of compressed-tensors' config, and the modules that they name."""

import dataclasses
from collections.abc import Sequence

from aqtlite.checkpoint.errors import CheckpointError
from aqtlite.checkpoint.quantized_formats import base, compressed_packing, fp8
from aqtlite.checkpoint.quantized_formats.settings import Settings

_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
)
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")

_WITH_G_IDX = "group", "dynamic", True
"""Values of ``actorder``; with "weight" and "static", inputs keep their order."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How a group of the config stores its weights."""

    format: str
    bits: int
    strategy: str
    group: int | None
    block: tuple[int, int] | None
    is_symmetric: bool
    has_g_idx: bool
    """Whether groups are of inputs in the order of their activations."""

    targets: tuple[str, ...]

    is_dense: bool | None
    """How integers are packed (`compressed_packing`), by the version; None without."""

    def names(self, module: str) -> bool:
        """Whether a target is this module's own path, or matches it."""
        return any(_matches(one, module) for one in self.targets)

    @property
    def names_classes(self) -> bool:
        """Whether a target is the name of a class, of which a file says nothing."""
        return any("." not in one and one[:1].isupper() for one in self.targets)


def schemes_of(settings: Settings) -> list[Scheme]:
    """Reads the groups that quantize weights."""
    groups = settings.inner("config_groups")
    if groups is None or not groups.values:
        raise settings.wrong("config_groups", "an object with a group or more")
    outer = settings.values.get("format")
    is_dense = compressed_packing.is_dense(settings.values.get("version"))
    schemes = []
    for key in groups.values:
        group = groups.inner(key)
        weights = None if group is None else group.inner("weights")
        if group is not None and weights is not None:
            schemes.append(_scheme(group, weights, outer, is_dense))
    return schemes


def _scheme(
    group: Settings, weights: Settings, outer: object, is_dense: bool | None
) -> Scheme:
    inner = group.values.get("format")
    found = Settings({"format": outer if inner is None else inner}, group.where)
    format_ = found.one_of("format", _FORMATS)
    has_group = weights.values.get("group_size") not in (None, -1, 0)
    return Scheme(
        format=format_,
        bits=weights.integer("num_bits", 1),
        strategy=weights.one_of("strategy", _STRATEGIES, "tensor"),
        group=weights.integer("group_size", 1) if has_group else None,
        block=fp8.block_size(weights, "block_structure"),
        is_symmetric=weights.flag("symmetric", default=True),
        has_g_idx=weights.values.get("actorder") in _WITH_G_IDX,
        targets=group.strings("targets"),
        is_dense=is_dense,
    )


def scheme_of(module: str, schemes: Sequence[Scheme], settings: Settings) -> Scheme:
    """The scheme of a module: of a group that names it, or the one for classes."""
    named = [one for one in schemes if one.names(module)]
    found = named[:1] or [one for one in schemes if one.names_classes]
    kinds = {dataclasses.replace(one, targets=()) for one in found}
    if len(kinds) == 1:
        return found[0]
    problem = "no group names" if not kinds else "several groups may be meant for"
    raise CheckpointError(
        f"{settings.where}: {problem} {module}, which is quantized; name it in targets"
    )


def _matches(target: str, module: str) -> bool:
    pattern = target.removeprefix("re:")
    return module == target if pattern == target else base.matches(pattern, module)


def is_ignored(module: str, patterns: Sequence[str]) -> bool:
    """Whether `ignore` of the config names a module."""
    return any(_matches(one, module) for one in patterns)
