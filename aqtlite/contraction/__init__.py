"""Private: a quantized contraction and its gradients, the core of the library.

`dot_general`, `einsum`, `conv_general_dilated` and `ragged_dot` take the arguments of
`jax.lax` and call `contract`; `execution` resolves the config for the operands;
`differentiation` quantizes the operands, sums products (`accumulation`), scales the
sums and defines the gradients (`straight_through`). Read `dot_general` first, then
`contract`, `execution` and `differentiation`.
"""
