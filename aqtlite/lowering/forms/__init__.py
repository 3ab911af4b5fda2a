"""Private: the forms in which one platform or processor sums products fastest.

`cpu`, `gpu` and `tpu` choose between the forms of a dot, `conv` and `ragged` between
those of the other contractions; each remaining file is one form, and sums the same
products as `plain`. Read `plain` first, then `cpu`.
"""
