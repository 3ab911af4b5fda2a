"""Private: where the axes of values come from, and what masks set to zero along them.

`axes` follows the axes of parameters to weights; `axis_rules` derives `axis_facts`,
equation by equation; `reshapes` says which axes become which. Read `axes` first.
"""
