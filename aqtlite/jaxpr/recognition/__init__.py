"""Private: patterns of equations that are recognized in jaxprs.

Biases, lookups of rows, one-hot operands, outputs that are equal or are inputs, and
products of floats that are no contractions. Each file stands for itself. Read
`producers` first.
"""
