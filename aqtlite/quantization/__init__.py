"""Private: quantization of one array by one `config.Tensor`.

`quantizer.quantize_array` is the only place where an array is quantized: it finds the
scale and rounds. `granularity` decides which elements share a scale; `preparation`
(`smoothing`, `rotation`, `sparsity`) and `padding` change operands before that.
`statistics`, `learned_parameters` and `gradient_statistics` hold the states of
calibrations. Read `quantizer` first.
"""
