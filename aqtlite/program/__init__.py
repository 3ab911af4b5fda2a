"""Private: quantizes, freezes and serves the contractions of whole programs.

`rules` select the contractions of a function to quantize, `plan` decides about each,
`quantize` evaluates the function by the plan, and `convert` freezes its weights.
`serving` is shared by all frameworks: finding weights, recording them, guards. Read
`quantize` first.
"""
