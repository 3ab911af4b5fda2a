"""Private: the quantized array: stored values, their scale and their grid.

`qtensor` has the class, a pytree with the methods of an array; `shape_operations` has
NumPy's functions. Nothing here quantizes an array. Read `qtensor` first.
"""
