"""Private: contractions in rules that functions have for their own gradients.

`in_rules` plans the contractions of a `jax.custom_vjp`; `recognized` says of which
contraction of the function they are the gradients; `rule_gradients` evaluates them as
`dlhs` and `drhs` of its config. Read `in_rules` first.
"""
