"""Files written when each calibration that needed the number of batches counted them.

`linen.msgpack` has the variables of `Layers` after a training step, the variables after
one more, and what both gave; `serving.safetensors` is what `convert_checkpoint` made of
those of `SERVED`, and `nnx.msgpack` has the pure dictionary of an `Mlp`.
"""
