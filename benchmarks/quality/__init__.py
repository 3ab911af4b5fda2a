"""The effect of quantization on the loss: every preset trained next to float32.

`presets` has the trained presets, `training` a training run, `records` the file of
finished runs, `summary` statistics of runs, `report` the table, and `plot` the plot.
"""
