"""Private: what only the bare call `model.apply(serving, x)` needs.

An injected function sees arrays, and no program: it finds its frozen weight by numbers
that stand in place of a frozen parameter, and a conversion records its operands while
Flax runs. Read `lookup` first.
"""
