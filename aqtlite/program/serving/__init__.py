"""The serving conversion of any framework's models, and serving; knows no framework.

A framework gives a `model.Model`, which says what the operands of its calls are made
of. `discovery` tells which of them are weights, `recording` makes them outputs of a
trace, `planning` decides which of them to freeze, `conversion` runs the plan, `report`
sums it up, and `lookup` finds the frozen weights when the model is served. Read `model`
first.
"""
