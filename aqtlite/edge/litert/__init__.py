"""The LiteRT converter and interpreter, in a process of their own.

Both may end the process that they run in. `aqtlite.edge.converter` starts this folder
as a program. Read `__main__` first.
"""
