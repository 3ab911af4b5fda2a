"""Private: analysis, slicing and rewriting of jaxprs, independent of the framework.

`equations` reads the parameters and bodies of equations, `analysis` walks a jaxpr
forward, `dependencies` and `axes` are two such analyses, `sites` finds contractions,
`rewriting` evaluates a jaxpr with equations replaced, `slicing` extracts the part that
computes some outputs, and `tracing` traces functions of pytrees. Read `equations`
first.
"""
