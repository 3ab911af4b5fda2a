"""The arithmetic of LiteRT's operators, integer for integer, on plain arrays.

Every function takes and gives integers, as the kernels of the interpreter do. Read
`fixed_point` first, then `contractions`.
"""
