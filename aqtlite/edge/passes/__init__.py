"""Passes over graphs, from JAX equations to integer operators.

`patterns` replaces functions of several equations, `translate` replaces the other
equations by operators, `simplify` and `fuse` merge operators, and `unify` groups the
values that share a grid. Read `translate` first.
"""
