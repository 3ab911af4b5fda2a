"""The operators that runtimes of full-integer programs have.

An operator knows what it computes on floats, and on integers. Read `base` first.
"""
