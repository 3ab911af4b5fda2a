"""Whole programs: which contractions are quantized, converted and served.

`rules` say which contractions of a function are quantized, `plan` decides about each,
`quantize` evaluates the function so, and `convert` freezes its weights, recorded and
served by `program`. `serving` holds what all frameworks share: finding weights,
recording, guards. Read `quantize` first, then `serving`.
"""
