"""Private: analysis, slicing and rewriting of jaxprs, independent of the framework.

`equations` reads the parameters and bodies of equations, `analysis` walks a jaxpr
forward to find what values depend on, `sites` finds contractions, `rewriting` evaluates
a jaxpr with equations replaced, `slicing` extracts the part that computes some outputs,
and `tracing` traces functions of pytrees. Read `equations` first.
"""
