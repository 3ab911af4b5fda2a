"""The loss that quantization costs: every preset trained beside float32.

`presets` is the table of what is trained, `training` one run, `records` the file of
finished runs, `summary` their statistics, `report` the table, and `plot` the picture of
it.
"""
