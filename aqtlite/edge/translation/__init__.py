"""What equations of JAX are in operators of a full-integer program.

A function for each primitive, by kind. Read `base` first.
"""
