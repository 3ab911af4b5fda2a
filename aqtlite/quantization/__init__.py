"""Private: one array and one `config.Tensor`, quantized.

`granularity` says which elements share a scale, `quantizer` finds scales and rounds,
`operands` prepares an operand of a contraction; `smoothing` and `padding` change it
before. `statistics`, `learned_parameters` and `gradient_statistics` are the states that
some calibrations keep. Read `quantizer` first.
"""
