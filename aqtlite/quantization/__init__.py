"""Private: one array and one `config.Tensor`, quantized.

`quantizer.quantize_array` is the one place where an array is quantized: it finds the
scale and rounds; `granularity` says which elements share one, `smoothing` and `padding`
change operands before. `statistics`, `learned_parameters` and `gradient_statistics` are
the states that some calibrations keep. Read `quantizer` first.
"""
