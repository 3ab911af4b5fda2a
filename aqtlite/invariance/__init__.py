"""Private: programs whose bits depend on values alone.

The program of a function is evaluated with each float operation in a form that gives
one result in every program. Read `transform` first, then `finding`, which operations
have a form, and `rules`, the form of each primitive: products that compilers do not
merge with sums (`rounding`, `arithmetic`), functions written out in such products
(`functions`), sums in a fixed order (`sums`, `contractions`).
"""
