"""Bits per layer: what each contraction tolerates, and the best use of some bytes.

All alternatives of all contractions are in one compiled program, which takes the choice
between them as an argument. Read `sensitivity` first, then `switches`.
"""
