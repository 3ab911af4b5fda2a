"""Serving conversion and serving, independent of the framework.

A framework implements `model.Model`, which reports the parameters behind the operands
of every call. `weights` chooses the weights among the operands and makes them outputs
of a trace, `planning` decides which to freeze, `conversion` runs the plan, `report`
sums it up, and `lookup` finds the frozen weights at serving time. Read `model` first.
"""
