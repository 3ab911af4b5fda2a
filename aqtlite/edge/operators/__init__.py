"""The operators that runtimes of full-integer programs support.

An operator defines a computation on floats and on integers. Read `base` first.
"""
