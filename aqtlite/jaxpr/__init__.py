"""Private: analysis, slicing and evaluation of jaxprs; knows no framework.

`equations` says which equations have a body, `analysis` walks a jaxpr forward,
`dependencies` and `axes` are two such analyses, `evaluation` runs a part of a jaxpr,
`slicing` traces that part as a jaxpr of its own, and `tracing` makes jaxprs. Read
`equations` first.
"""
