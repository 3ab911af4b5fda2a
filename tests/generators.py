"""Random quantized contractions: dimension numbers, data, dtypes and configs.

`case` makes the one that belongs to a seed, always the same, with as many draws of its
data as are wanted: one compiled program serves all of them. Everything that a config
can say occurs, and so do empty axes, channels of zeros, ties, NaN, long sums, and
magnitudes near the end of float32.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from aqtlite import calibration, config, numerics

DTYPES = ("float32", "bfloat16", "float16")
_LARGEST_CASE = 2**15  # products
_LARGEST_TILED_RANK = 5  # of a gradient; its tiles are an axis more


@dataclasses.dataclass(frozen=True)
class Case:
    """One contraction to be run with both gradients."""

    seed: int
    draw: int
    cfg: config.DotGeneral
    lhs: np.ndarray
    rhs: np.ndarray
    g: np.ndarray  # the cotangent, in the shape and dtype of the output
    dims: Any
    preferred_element_type: np.dtype | None
    has_key: bool
    is_jitted: bool

    def __str__(self) -> str:
        program = "jit" if self.is_jitted else "eager"
        lhs, rhs, out = (f"{x.dtype}{x.shape}" for x in (self.lhs, self.rhs, self.g))
        return (
            f"seed {self.seed}, draw {self.draw}, {program}: {lhs} x {rhs} -> {out}, "
            f"{self.dims}, key={self.has_key}\n{self.cfg}"
        )


class _Random:
    """A generator of the few kinds of choices that a case is made of."""

    def __init__(self, *seeds: int):
        self.rng = np.random.default_rng([9, *seeds])

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def one_of(self, values: Any) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def upto(self, largest: int) -> int:
        return int(self.rng.integers(largest + 1))

    def shuffled(self, values: Any) -> list[Any]:
        return [values[i] for i in self.rng.permutation(len(values))]


def case(seed: int, draw: int = 0) -> Case:
    """The contraction that belongs to a seed.

    Args:
        seed: decides about everything but the numbers.
        draw: decides about the numbers.
    """
    random = _Random(seed)
    is_long = random.chance(0.04)
    lhs_shape, rhs_shape, dims = _dimension_numbers(random, is_long)
    kind = _kind(random, is_long)
    lhs_dtype, rhs_dtype, preferred = _dtypes(random, kind)
    out_dtype = preferred or jnp.promote_types(lhs_dtype, rhs_dtype)
    out_axes = _out_axes(dims, len(lhs_shape), len(rhs_shape))
    out_shape = tuple((lhs_shape, rhs_shape)[side][axis] for side, axis in out_axes)
    cfg = _config(random, lhs_shape, rhs_shape, out_shape, dims, kind)
    if seed % 4 == 3 and kind != "huge":
        cfg = _with_blocks(_Random(seed, 1 << 20), cfg)
    has_key, is_jitted = random.chance(0.5), random.chance(0.9)
    random = _Random(seed, draw)
    is_huge = kind == "huge"
    gradient = random.one_of((cfg.dlhs.lhs, cfg.drhs.lhs))
    rhs_kind, g_kind = ("normal", "small") if is_huge else (kind, kind)
    return Case(
        seed=seed,
        draw=draw,
        cfg=cfg,
        lhs=_data(random, lhs_shape, lhs_dtype, kind, cfg.fwd.lhs),
        rhs=_data(random, rhs_shape, rhs_dtype, rhs_kind, cfg.fwd.rhs),
        g=_data(random, out_shape, out_dtype, g_kind, gradient),
        dims=dims,
        preferred_element_type=preferred,
        has_key=has_key,
        is_jitted=is_jitted,
    )


# Shapes and data.


def _dimension_numbers(random: _Random, is_long: bool):
    """Shapes of both operands, and dimension numbers with axes in any order."""
    if is_long:
        batches, contracted, rests = 0, 1, (1, 1)
    else:
        batches, contracted = random.upto(2), random.upto(2)
        rests = random.upto(2), random.upto(2)
    shared = [("batch", i) for i in range(batches)]
    summed = [("contracting", i) for i in range(contracted)]
    lhs_names = random.shuffled(shared + summed + [("lhs", i) for i in range(rests[0])])
    rhs_names = random.shuffled(shared + summed + [("rhs", i) for i in range(rests[1])])
    names = sorted({*lhs_names, *rhs_names})
    largest = 17 if len(names) <= 4 else 7
    sizes = {name: 1 + random.upto(largest - 1) for name in names}
    while np.prod(list(sizes.values())) > _LARGEST_CASE:
        name = random.one_of(names)
        sizes[name] = 1 + sizes[name] // 2
    if is_long:
        sizes[summed[0]] = 256 + random.upto(768)
    if names and random.chance(0.03):
        sizes[random.one_of(names)] = 0
    shared, summed = random.shuffled(shared), random.shuffled(summed)

    def places(names, wanted):
        return tuple(names.index(name) for name in wanted)

    dims = (
        (places(lhs_names, summed), places(rhs_names, summed)),
        (places(lhs_names, shared), places(rhs_names, shared)),
    )
    lhs_shape = tuple(sizes[name] for name in lhs_names)
    rhs_shape = tuple(sizes[name] for name in rhs_names)
    return lhs_shape, rhs_shape, dims


def _remaining(ndim: int, contracting, batch) -> tuple[int, ...]:
    return tuple(i for i in range(ndim) if i not in contracting and i not in batch)


def _out_axes(dims, lhs_ndim: int, rhs_ndim: int) -> list[tuple[int, int]]:
    """For each axis of the output, the operand (0 or 1) and the axis it comes from."""
    (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = dims
    lhs_ra = _remaining(lhs_ndim, lhs_ca, lhs_ba)
    rhs_ra = _remaining(rhs_ndim, rhs_ca, rhs_ba)
    return [(0, axis) for axis in (*lhs_ba, *lhs_ra)] + [(1, axis) for axis in rhs_ra]


def _kind(random: _Random, is_long: bool) -> str:
    if is_long and random.chance(0.5):
        return "level"
    kinds = {"normal": 8, "heavy": 3, "ties": 3, "edges": 8, "channels": 3}
    kinds |= {"nan": 1, "huge": 1}
    return random.one_of([kind for kind, count in kinds.items() for _ in range(count)])


def _dtypes(random: _Random, kind: str):
    lhs = random.one_of(DTYPES) if random.chance(0.5) else "float32"
    rhs = random.one_of(DTYPES) if random.chance(0.3) else lhs
    preferred = random.one_of(DTYPES) if random.chance(0.4) else None
    if kind == "huge":
        lhs, rhs, preferred = "float32", "float32", None
    return jnp.dtype(lhs), jnp.dtype(rhs), preferred and jnp.dtype(preferred)


def _data(
    random: _Random, shape, dtype, kind: str, tensor: config.Tensor
) -> np.ndarray:
    """An array of a kind; `tensor` is how it will be quantized."""
    rng = random.rng
    x = rng.standard_normal(shape)
    if kind == "heavy":
        x = rng.standard_t(2.0, shape)
    elif kind == "ties":
        x = rng.integers(-6, 7, shape) * 0.5
    elif kind == "edges":
        # Halfway between the points of a grid: the last bit decides.
        reach = tensor.grid.bound if tensor.is_quantized else 127.5
        largest = 1 + rng.random()
        steps = rng.integers(-int(reach), int(reach) + 1, shape)
        x = np.where(rng.random(shape) < 0.3, largest, largest * (steps + 0.5) / reach)
        x = np.clip(x, -largest, largest)
    elif kind == "channels" and x.ndim:
        axis = random.upto(x.ndim - 1)
        sizes = [n if i == axis else 1 for i, n in enumerate(shape)]
        reach = 2.0 if dtype == jnp.float16 else 6.0
        x = x * 10.0 ** rng.uniform(-reach, reach, sizes)
        x = np.where(rng.random(sizes) < 0.1, 0.0, x)
    elif kind == "level":
        x = rng.uniform(0.9, 1.0, shape)
    elif kind == "huge":
        x = (
            np.sign(x)
            * rng.uniform(0.1, 1.0, shape)
            * random.one_of((1e34, 3e36, 9e37))
        )
    elif kind == "small":
        x = x * 1e-3
    elif kind == "nan" and x.size and random.chance(0.7):
        x.flat[random.upto(x.size - 1)] = np.nan
    return np.asarray(x).astype(np.float32).astype(dtype)


# Configs.


def _config(
    random: _Random, lhs_shape, rhs_shape, g_shape, dims, kind: str
) -> config.DotGeneral:
    (lhs_ca, rhs_ca), (lhs_ba, rhs_ba) = dims
    out_axes = _out_axes(dims, len(lhs_shape), len(rhs_shape))
    fwd = _contraction(random, (lhs_shape, lhs_ca), (rhs_shape, rhs_ca), kind)
    gradients = {}
    for name, side, shape, other_ca, other_ba, forward, rank in (
        ("dlhs", 1, rhs_shape, rhs_ca, rhs_ba, fwd.rhs, len(lhs_shape)),
        ("drhs", 0, lhs_shape, lhs_ca, lhs_ba, fwd.lhs, len(rhs_shape)),
    ):
        summed = _remaining(len(shape), other_ca, other_ba)
        g_ca = tuple(
            i
            for i, (which, axis) in enumerate(out_axes)
            if which == side and axis in summed
        )
        gradients[name] = _contraction(
            random, (g_shape, g_ca), (shape, summed), kind, forward, rank
        )
    cfg = config.DotGeneral(fwd=fwd, **gradients)
    if cfg.is_quantized:
        return cfg
    return config.update(cfg, {"fwd.rhs.numerics": numerics.IntSymmetric(bits=8)})


def _with_blocks(random: _Random, cfg: config.DotGeneral) -> config.DotGeneral:
    """The config with sub-channel blocks of some operands."""
    changes: dict[str, Any] = {}
    pad = random.chance(0.5) and _has_zeros(cfg)
    for name in ("fwd", "dlhs", "drhs"):
        raw = getattr(cfg, name)
        for side in ("lhs", "rhs"):
            if getattr(raw, side).is_quantized and random.chance(0.7):
                size, remaining = 1 + random.upto(5), 1 + random.upto(3)
                if pad:  # Sizes that divide one another.
                    size = random.one_of((1, 2, 4))
                blocks = config.Blocks(
                    size=size,
                    remaining_size=remaining if random.chance(0.5) else 1,
                    fit=not pad,
                    pad=pad,
                    span_others=random.chance(0.3),
                )
                changes[f"{name}.local_aqt"] = None
                changes[f"{name}.{side}.calib_shared_axes"] = None
                changes[f"{name}.{side}.blocks"] = blocks
    return config.update(cfg, changes)


def _has_zeros(cfg: config.DotGeneral) -> bool:
    """Tells whether operands can be padded with zeros."""
    raws = cfg.fwd, cfg.dlhs, cfg.drhs
    tensors = [one for raw in raws for one in (raw.lhs, raw.rhs) if one.is_quantized]
    return all(
        getattr(one.grid, "preserve_zero", True) and one.calibration.ignores_zeros
        for one in tensors
    )


def _contraction(
    random: _Random,
    lhs,
    rhs,
    kind: str,
    forward: config.Tensor | None = None,
    rank: int = 0,
) -> config.DotGeneralRaw:
    """A contraction's config.

    Args:
        random: decides.
        lhs: shape and contracting axes.
        rhs: the same.
        kind: of the data.
        forward: what a backward contraction may reuse.
        rank: of its result.
    """
    lhs_shape, lhs_ca = lhs
    is_backward = forward is not None
    tiles = None
    if is_backward and lhs_ca and random.chance(0.2):
        size = lhs_shape[lhs_ca[0]]
        counts = [n for n in range(1, size + 1) if size % n == 0]
        tiles = random.one_of(counts) if counts else None
    is_reused = is_backward and forward.is_quantized and random.chance(0.5)
    own_axes = tiles is None
    left = _tensor(random, *lhs, kind, own_axes, noise=is_backward)
    right = _tensor(random, *rhs, kind, own_axes, use_fwd_quant=is_reused)
    has_tiles = left.is_quantized or (right.is_quantized and not is_reused)
    # XLA:CPU (jaxlib 0.10.2) crashes on sums of products of rank 7:
    # jax.jit(lambda x, s: (x * s).sum(0)) with a broadcast s.
    if not has_tiles or rank > _LARGEST_TILED_RANK:
        tiles = None
    contracted = (left, right, forward) if is_reused else (left, right)
    in_dtype = _in_dtype(random, contracted, kind)
    return config.DotGeneralRaw(
        lhs=left,
        rhs=right,
        dg_in_dtype=in_dtype,
        dg_accumulator_dtype=_accumulator(random, left, right, in_dtype),
        local_aqt=tiles and config.LocalAqt(contraction_axis_shard_count=tiles),
    )


def _in_dtype(random: _Random, contracted, kind: str) -> str | None:
    if kind == "huge" or not random.chance(0.3):
        return None
    wide = any(
        one.is_quantized and one.grid.storage_dtype == jnp.int16 for one in contracted
    )
    if wide:
        return "float32"
    # float16 does not hold what other channels hold.
    return random.one_of(DTYPES[:2] if kind == "channels" else DTYPES)


def _accumulator(random: _Random, left, right, in_dtype) -> str | None:
    if not random.chance(0.3):
        return None
    integers = all(one.is_quantized and not one.use_fake_quant for one in (left, right))
    if integers and in_dtype is None and not right.use_fwd_quant:
        return random.one_of(("int32", "float32"))
    return random.one_of(("float32", "float32", "bfloat16"))


def _tensor(
    random: _Random,
    shape,
    contracting,
    kind: str,
    own_axes: bool,
    noise: bool = False,
    use_fwd_quant: bool = False,
) -> config.Tensor:
    if random.chance(0.25):
        return config.Tensor(use_fwd_quant=use_fwd_quant)
    fake = random.chance(0.2)
    clipping = float(np.float32(random.rng.uniform(0.3, 1.5)))
    if kind == "huge" or random.chance(0.7):
        clipping = None
    return config.Tensor(
        numerics=_grid(random, noise, kind),
        calib_shared_axes=_shared_axes(random, len(shape), contracting, fake)
        if own_axes
        else None,
        scale_stop_grad=random.chance(0.5),
        calibration=calibration.AbsMax(clipping_scale=clipping),
        # The power of two above the largest magnitudes is not a float32.
        po2_scale=kind != "huge" and random.chance(0.2),
        use_fake_quant=fake,
        use_fwd_quant=use_fwd_quant,
    )


def _grid(random: _Random, noise: bool, kind: str) -> numerics.IntSymmetric:
    if kind == "level" and random.chance(0.8):
        # The largest integers, whose long sums float32 does not hold.
        return numerics.IntSymmetric(bits=8, preserve_zero=False)
    bits = 8 if random.chance(0.4) else 1 + random.upto(7)
    stochastic = noise and random.chance(0.4)
    return numerics.IntSymmetric(
        bits=bits,
        preserve_zero=False if random.chance(0.2) else None,
        preserve_max_val=stochastic or random.chance(0.4),
        clip=random.chance(0.8),
        clip_gradient=random.chance(0.3),
        stochastic_rounding=stochastic,
    )


def _shared_axes(random: _Random, ndim: int, contracting, fake: bool):
    if not ndim or random.chance(0.6):
        return None
    if random.chance(0.4):
        return "per_tensor"
    axes = {random.upto(ndim - 1) for _ in range(2)}
    if not (fake and random.chance(0.5)):
        axes |= set(contracting)
    signed = [axis - ndim if random.chance(0.3) else axis for axis in axes]
    return tuple(random.shuffled(signed))
