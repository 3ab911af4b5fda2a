"""Translation of equations of JAX into operators of a full-integer program.

A function for each primitive, by kind. Read `base` first.
"""
