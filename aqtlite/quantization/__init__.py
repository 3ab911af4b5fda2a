"""Private: one array and one `config.Tensor`, quantized.

`operands.quantize_array` is the one place where an array is quantized; `granularity`
says which elements share a scale, `quantizer` finds scales and rounds, `smoothing` and
`padding` change operands before. `statistics`, `learned_parameters` and
`gradient_statistics` are the states that some calibrations keep. Read `operands` first.
"""
