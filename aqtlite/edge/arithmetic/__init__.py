"""Bit-exact arithmetic of LiteRT's operators on plain arrays.

Functions map integers to integers, like the interpreter's kernels. Read `fixed_point`
first, then `contractions`.
"""
