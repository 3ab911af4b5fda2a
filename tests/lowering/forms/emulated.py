"""Instructions of x86-64 that a processor may lack, in those of any."""

import contextlib

from aqtlite.lowering.forms import (
    custom_call,
    integer_products,
    panel_amx,
    panel_kernel,
)
from aqtlite.lowering.forms.integer_products import Instructions
from aqtlite.lowering.forms.panels import PANEL, WORD

NAME = "tested_panels"
"""Beginning of the names of kernels that `take_amx` has compiled."""


class Dots(integer_products.Dots):
    """The products of VNNI."""

    def multiplied(self, f, part, a, b):
        kind = part.type
        for start in range(0, 32, 8):
            left, right = f.constant(kind, 24 - start), f.constant(kind, 24)
            one = f.at.lshr(f.at.shl(a, left), right)
            other = f.at.ashr(f.at.shl(b, left), right)
            part = f.at.add(part, f.at.mul(one, other))
        return part


def multiply_many_rows(self, arrays, sizes, row, tile):
    """The sums that `panel_amx.ManyRowsOfPanel.multiply` writes with AMX."""
    f, size, words = self.f, PANEL * WORD, Instructions.AMX.block // WORD
    total = f.variable(self.ints)
    with f.loop(0, self.rows * self.lines) as line:
        f.at.store(f.constant(self.ints, 0), total)
        with f.loop(0, sizes.blocks) as block, f.loop(0, words) as word:
            step = f.sum(f.times(tile, sizes.blocks), block)
            weights = f.load(
                arrays.weights,
                f.times(f.sum(f.times(step, words), word), size),
                self.ints,
            )
            first = f.times(f.sum(f.times(step, sizes.rows), row), self.lines)
            place = f.sum(f.times(f.sum(first, line), size), f.times(word, WORD))
            other = f.splat(f.load(arrays.rows.values, place, f.int), PANEL)
            so_far = f.at.load(total)
            f.at.store(Dots().multiplied(f, so_far, weights, other), total)
        f.store(f.at.load(total), self.found, f.times(line, size))


def take_amx(monkeypatch):
    """Has kernels multiply as with AMX, by instructions of any processor."""

    monkeypatch.setattr(
        panel_amx, "configured", lambda f, lines: contextlib.nullcontext()
    )
    monkeypatch.setattr(panel_amx.ManyRowsOfPanel, "multiply", multiply_many_rows)
    monkeypatch.setattr(Instructions, "products", Dots())
    monkeypatch.setattr(panel_kernel, "registered", _registered)
    monkeypatch.setattr(integer_products, "of_processor", lambda: Instructions.AMX)


def _registered(kernel):
    *numbers, grid = vars(kernel).values()
    name = "_".join([NAME, *map(str, map(int, numbers)), str(hash(grid))])
    custom_call.register(name, lambda: panel_kernel.PanelFunction(kernel))
    return name
