"""Private: modules of Flax as functions, without importing Flax.

`flax_models` takes models where functions are wanted; `marked_modules` and
`nnx_methods` mark the equations of NNX modules with their paths, and `nnx_arguments`
passes NNX objects among arrays. Read `flax_models` first.
"""
