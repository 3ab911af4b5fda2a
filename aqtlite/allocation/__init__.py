"""Private: bits per layer, by what each contraction tolerates, under a budget.

All alternatives of all contractions are in one compiled program, which takes the choice
between them as an argument. Read `sensitivity` first, then `switches`.
"""
