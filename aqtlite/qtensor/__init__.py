"""Private: the quantized array, which is stored values, their scale, and their grid.

`qtensor` is the class, a pytree with the methods of an array; `shape_operations` has
what NumPy offers as functions. Nothing here quantizes an array. Read `qtensor` first.
"""
