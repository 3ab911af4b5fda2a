"""Quantized contractions for Flax Linen, and the conversion of Linen models.

Public names are in `aqtlite.flax`. `dot_general` and its siblings are what layers take,
`quantize_model` quantizes by rules, `convert` freezes weights. Read `dot_general`
first.
"""
