"""Private: measures whether the contractions of a plan are faster quantized.

`measure` runs each contraction by itself, `measurement` holds the times and the rules
that follow from them, and `kept_times` stores them for each processor. Read `measure`
first.
"""
