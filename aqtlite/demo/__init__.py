"""The main job, ``aqtlite demo``: a small language model in float32 and in int8.

Each step of it is one file, and reads as an example of how to use the library:

- `options`: what the user can choose;
- `corpus`: the text, as bytes, split into training and validation;
- `model`: a transformer whose projections take an `AqtDotGeneral`;
- `training`: both models trained side by side on the same data;
- `artifact`: what is saved for serving, and how it is restored;
- `serving`: the fresh process that loads an artifact and serves it;
- `generate`: sampling text token by token with a KV cache;
- `progress`: bars on a terminal, lines elsewhere;
- `report`: the table, the loss curves and the samples;
- `run`: the order of all that.
"""
