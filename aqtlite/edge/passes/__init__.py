"""Passes over graphs, from equations of JAX to operators that are rounded once.

`translate` names the operators, `patterns` recognizes those of several equations,
`fold` and `fuse` join neighbours, `unify` groups values of equal integers. Read
`translate` first.
"""
