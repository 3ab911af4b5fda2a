"""Private: what is done to operands before they are quantized.

`preparation` calls `smoothing`, `rotation` and `sparsity` where the config asks for
them; `padding` fills blocks with zeros. Read `preparation` first.
"""
