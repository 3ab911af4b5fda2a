"""Private: axes, blocks, tiles and shardings of contractions and of their scales.

Plain functions of shapes and axes, without any quantization: `dimension_numbers` and
`ragged_axes` are the algebra of axes, `block_shapes` handles scales shared by blocks,
`sharding` the shardings in an array's type, and `processes` what is alike in all of
those that an array spans. Read `dimension_numbers` first.
"""
