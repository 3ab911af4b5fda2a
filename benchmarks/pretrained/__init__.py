"""Networks that others trained, quantized: what that costs on data with true labels.

`networks` has the networks and where they are, `tasks` the data and the metric of each,
`routes` the ways to quantize that are documented, `peers` those of onnxruntime,
`contestants` all of them, `measuring` a contestant's figures, `records` the file of
finished ones, and `report` the tables.
"""
