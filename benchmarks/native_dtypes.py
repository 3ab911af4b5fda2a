"""List the dtypes in which each preset is contracted on each platform.

    python -m benchmarks.native_dtypes [--presets fp8 mxfp8] [--write docs/numerics.md]

Lowers a contraction of bfloat16 operands and both of its gradients for one device of
each platform, on any host, and reads the dtypes of the products from the programs. A
preset whose gradients are contracted in other dtypes has their dtypes in brackets. The
forms on CPUs are those for the processor of this host.
"""

import argparse
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import aqtlite
from aqtlite import config
from aqtlite.program import contracted_in
from benchmarks.harness import pages

PLATFORMS = ("cpu", "cuda", "tpu")
NAME = "native dtypes"
"""Name of the table in its page."""

PRESETS: Mapping[str, config.DotGeneral] = {
    "fully_quantized()": config.fully_quantized(),
    "w4a8()": config.w4a8(),
    "weight_only()": config.weight_only(),
    "fp8()": config.fp8(),
    "block_fp8()": config.block_fp8(),
    "mxfp8()": config.mxfp8(),
    "mxfp6()": config.mxfp6(),
    "mxfp4()": config.mxfp4(),
    "mxint8()": config.mxint8(),
    "nvfp4()": config.nvfp4(),
}

_ROWS, _FEATURES, _OUTPUTS, _GROUPS = 128, 512, 256, 4


def matmul(cfg: config.DotGeneral) -> tuple[Callable[..., Any], list[Any]]:
    """A matrix product, and the types of its operands."""
    dot = aqtlite.make_dot_general(cfg)

    def run(x: Any, w: Any) -> Any:
        return dot(x, w, (((1,), (0,)), ((), ())))

    return run, [_array(_ROWS, _FEATURES), _array(_FEATURES, _OUTPUTS)]


def ragged_dot(cfg: config.DotGeneral) -> tuple[Callable[..., Any], list[Any]]:
    """A product of groups of rows, and the types of its operands."""
    dot = aqtlite.make_ragged_dot(cfg)

    def run(x: Any, w: Any) -> Any:
        return dot(x, w, jnp.full(_GROUPS, _ROWS // _GROUPS, jnp.int32))

    return run, [_array(_ROWS, _FEATURES), _array(_GROUPS, _FEATURES, _OUTPUTS)]


def convolution(cfg: config.DotGeneral) -> tuple[Callable[..., Any], list[Any]]:
    """A convolution of images, and the types of its operands."""
    conv = aqtlite.make_conv_general_dilated(cfg)

    def run(x: Any, kernel: Any) -> Any:
        layout = ("NHWC", "HWIO", "NHWC")
        return conv(x, kernel, (1, 1), "SAME", dimension_numbers=layout)

    return run, [_array(32, 8, 8, _FEATURES), _array(3, 3, _FEATURES, _OUTPUTS)]


CONTRACTIONS = {
    "": (matmul, PRESETS),
    "ragged_dot": (
        ragged_dot,
        {name: PRESETS[name] for name in ("fully_quantized()", "fp8()", "block_fp8()")},
    ),
    "convolution": (
        convolution,
        {name: PRESETS[name] for name in ("fully_quantized()", "fp8()", "mxfp8()")},
    ),
}
"""Contractions, and presets to list of each; the first has no name in the table."""


def dtypes(
    function: Callable[..., Any], operands: Sequence[Any], platform: str
) -> tuple[str, str, str]:
    """The dtypes of a contraction and of its gradients for lhs and rhs."""
    out = jax.eval_shape(function, *operands)

    def for_lhs(g: Any, x: Any, w: Any) -> Any:
        return jax.vjp(lambda x: function(x, w), x)[1](g)

    def for_rhs(g: Any, x: Any, w: Any) -> Any:
        return jax.vjp(lambda w: function(x, w), w)[1](g)

    programs = (function, operands), (for_lhs, [out, *operands])
    forward, lhs, rhs = (
        " and ".join(contracted_in.products(program, *args, platform=platform))
        for program, args in (*programs, (for_rhs, [out, *operands]))
    )
    return forward, lhs, rhs


def rows(presets: Sequence[str] = tuple(PRESETS)) -> list[list[str]]:
    """The cells of the table, a list for each preset."""
    found = []
    for kind, (make, listed) in CONTRACTIONS.items():
        for name, cfg in listed.items():
            if name in presets:
                cells = [cell(*dtypes(*make(cfg), one)) for one in PLATFORMS]
                found.append([f"`{name}`{f', {kind}' if kind else ''}", *cells])
    return found


def as_markdown(table: Sequence[Sequence[str]]) -> str:
    """The table of a page."""
    lines = [["preset", *PLATFORMS], ["---"] * (1 + len(PLATFORMS)), *table]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def cell(forward: str, lhs: str, rhs: str) -> str:
    """The cell of dtypes: the gradients' in brackets, if they differ."""
    if forward == lhs == rhs:
        return forward
    return f"{forward} ({lhs if lhs == rhs else f'{lhs}; {rhs}'})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write it into a page if asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.native_dtypes", description=__doc__.splitlines()[0]
    )
    names = [name.removesuffix("()") for name in PRESETS]
    parser.add_argument("--presets", nargs="+", choices=names, default=names)
    parser.add_argument("--write", type=pathlib.Path, help="a page with its markers")
    asked = parser.parse_args(arguments)
    text = as_markdown(rows([f"{name}()" for name in asked.presets]))
    print(text)
    if asked.write is not None:
        pages.write(asked.write, {NAME: text})


if __name__ == "__main__":
    main()
