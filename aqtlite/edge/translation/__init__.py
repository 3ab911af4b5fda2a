"""Translation of JAX equations into operators of a full-integer program.

Each primitive has a function, in a file by kind. Read `base` first.
"""
