"""The quantized array: stored values, their scale, and the grid that decodes them.

`qtensor` is the class, a pytree with the methods of an array; `shape_operations` has
what NumPy offers as functions. Nothing here quantizes: arrays come from
`aqtlite.quantization`. Read `qtensor` first.
"""
