"""The serving conversion of any framework's models, and serving; knows no framework.

A framework gives a `model.Model`, which traces calls. `discovery` finds the operands
that are weights, `recording` makes them outputs of a trace, `planning` decides which
of them to freeze, `conversion` runs the plan, `report` sums it up, and `lookup` finds
the frozen weights when the model is served. Read `model` first.
"""
