"""Quantized contractions for Flax Linen, and the conversion of Linen models.

Public names are in `aqtlite.flax`. `dot_general` and its siblings are injected into
layers, `quantize_model` quantizes by rules, `convert` freezes weights. Read
`dot_general` first.
"""
