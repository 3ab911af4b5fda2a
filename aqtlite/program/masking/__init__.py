"""Private: statistics of the tokens of padded batches that count.

A program that gathers statistics is evaluated together with a mask for each of its
values, which follows the tokens through reshapes, gathers, contractions and loops. Read
`gathering` first, then `evaluation`; `rules` has the masks of the results of each
primitive.
"""
