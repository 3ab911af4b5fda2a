"""``aqtlite demo``: train and serve a small language model in float32 and in int8.

Each step is one file, and an example of using the library:

- `options`: the command line;
- `corpus`: the text, as tokens, split into training and validation;
  `stories` writes it, and `tokens` learns what its tokens are;
- `model`: a transformer whose projections take an `AqtDotGeneral`;
- `training`: both models trained side by side on the same data;
- `snapshot`: the state of an interrupted training;
- `artifact`: saving serving variables, and restoring them;
- `serving`: a fresh process that loads an artifact and serves it;
- `generate`: sampling text token by token with a KV cache;
- `progress`: bars on a terminal, lines elsewhere;
- `report`: the table, the plots and the samples;
- `run`: the steps in order. Read `run` first.
"""
