"""Quantized functions of any functions: rules, plans, and serving.

`rules` says which contractions are quantized, `primitives` what the equations of a
jaxpr that contract are, `plan` decides about each, `quantize` evaluates a function so,
`program` records and serves its frozen weights, and `convert` makes these.
"""
