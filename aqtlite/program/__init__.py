"""Private: whole programs, of which contractions are quantized, frozen and served.

`rules` say which contractions of a function are quantized, `plan` decides about each,
`quantize` evaluates the function so, and `convert` freezes its weights. `serving` holds
what all frameworks share: finding weights, recording them, guards. Read `quantize`
first.
"""
