"""A quantized contraction and its gradients: READ THIS FOLDER FIRST.

`dot_general`, `einsum`, `conv_general_dilated` and `ragged_dot` take the arguments of
`jax.lax`; `execution` resolves what runs in what; `differentiation` quantizes the
operands, sums products (`accumulation`), scales, and has the gradients
(`straight_through`). Read `dot_general`, then `execution` and `differentiation`.
"""
