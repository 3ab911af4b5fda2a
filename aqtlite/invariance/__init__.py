"""Private: programs whose bits depend on values alone.

`transform.invariant` evaluates the program of a function with each float operation in a
form that gives one result in every program: products that compilers do not merge with
sums (`rounding`), functions written out in such products (`functions`), sums in a fixed
order (`sums`, `contractions`). `rules` has the form of each primitive.
"""
