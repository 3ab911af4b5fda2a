"""One array and one `config.Tensor`, quantized: ranges, scales, rounding, states.

`granularity` says which elements share a scale, `quantizer` finds scales and rounds,
and `operands` prepares an operand of a contraction. `statistics`, `learned_parameters`
and `gradient_statistics` are the states that some calibrations have; `smoothing` and
`padding` change an operand before it is quantized. Read `quantizer` first.
"""
