"""Private: axes, blocks, tiles and shardings of contractions and of their scales.

Plain functions of shapes and axes, with nothing of quantization in them:
`dimension_numbers` and `ragged_axes` are the algebra of axes, `block_shapes` that of
scales shared by blocks, `sharding` what an array's type says of meshes.
Read `dimension_numbers` first.
"""
