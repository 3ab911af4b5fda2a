"""Private: a quantized contraction and its gradients. The heart: read it first of all.

`dot_general`, `einsum`, `conv_general_dilated` and `ragged_dot` take the arguments of
`jax.lax`, and call `contract`; `execution` resolves what runs in what;
`differentiation` quantizes the operands, sums products (`accumulation`), scales the
sums, and has the gradients (`straight_through`). Read `dot_general` first, then
`contract`, `execution` and `differentiation`.
"""
